// How a matmul is cut. A unit is 32 outputs of one part (two row groups, one block of an int8
// operand), or of both parts of a GLU. Units of all parts form one sequence, which a team shares by
// claiming chunks. Nothing that a unit computes depends on the cut.
#pragma once

#include <cstdint>

#include "effinfer/threads.h"
#include "effinfer/tuning.h"
#include "ops/matmul.h"

namespace effinfer::cpu {

inline constexpr int64_t kUnitOutputs = 32;
inline constexpr int kLookupUnits = 4;  // of a chunk of a matmul by table look-up

struct MatmulUnit {
  const ops::MatmulPart* parts;  // one, or two with GLU
  int num_parts;
  int64_t index;         // within the part
  int64_t first_output;  // 32 * index
  int64_t num_outputs;   // up to 32
  int member;            // of the team, that computes it
};

[[gnu::always_inline]] inline int64_t units_of(const ops::MatmulPart& part) {
  return (part.weight.rows + kUnitOutputs - 1) / kUnitOutputs;
}

[[gnu::always_inline]] inline int64_t count_units(const ops::MatmulProblem& problem) {
  if (problem.glu != ops::UnaryOp::none) return units_of(problem.parts[0]);
  int64_t count = 0;
  for (int i = 0; i < problem.num_parts; ++i) count += units_of(problem.parts[i]);
  return count;
}

[[gnu::always_inline]] inline MatmulUnit find_unit(const ops::MatmulProblem& problem, int64_t index,
                                                   int member) {
  const ops::MatmulPart* part = problem.parts;
  if (problem.glu == ops::UnaryOp::none) {
    while (index >= units_of(*part)) index -= units_of(*part++);
  }
  const int64_t first = index * kUnitOutputs;
  const int64_t left = part->weight.rows - first;
  return {part,  problem.glu == ops::UnaryOp::none ? 1 : 2, index,
          first, left < kUnitOutputs ? left : kUnitOutputs, member};
}

[[gnu::always_inline]] inline int groups_of(const MatmulUnit& unit) {
  return unit.num_outputs > ops::kGroupRows ? 2 : 1;
}
[[gnu::always_inline]] inline const uint8_t* weights_of(const MatmulUnit& unit, int part) {
  return unit.parts[part].weight.group(2 * unit.index);
}

// Where to fetch ahead while a member reads a stream of weights: up to the stream's end, then in
// what it reads next.
class FetchAhead {
 public:
  FetchAhead() = default;  // nowhere
  [[gnu::always_inline]] FetchAhead(const uint8_t* end, const uint8_t* next, FetchDistance distance)
      : end_(end), jump_(next == nullptr ? 0 : next - end), l2_(distance.l2), l1_(distance.l1) {}

  // The lines that lie ahead of `bytes` from `data` on. Whoever reads on behind them has asked for
  // every line: also for those ahead of a header, whose few lines are not read in order.
  [[gnu::always_inline]] void ask_for(const uint8_t* data, int64_t bytes) const {
    if (l2_ > 0) fetch<2>(data + l2_, bytes);
    if (l1_ > 0) fetch<3>(data + l1_, bytes);
  }
  // The same of one line: what reads lines one by one asks for one at a time, as bursts wait.
  [[gnu::always_inline]] void ask_for_line(const uint8_t* line) const {
    if (l2_ > 0) __builtin_prefetch(place_of(line + l2_), 0, 2);
    if (l1_ > 0) __builtin_prefetch(place_of(line + l1_), 0, 3);
  }

 private:
  [[gnu::always_inline]] const uint8_t* place_of(const uint8_t* line) const {
    return line + (line >= end_ ? jump_ : 0);
  }
  template <int locality>
  [[gnu::always_inline]] void fetch(const uint8_t* lines, int64_t bytes) const {
    if (lines >= end_) {
      lines += jump_;
    } else if (lines + bytes > end_) {
      for (int64_t line = end_ - lines; line < bytes; line += 64) {
        __builtin_prefetch(lines + jump_ + line, 0, locality);
      }
      bytes = end_ - lines;
    }
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(lines + line, 0, locality);
  }

  const uint8_t* end_ = nullptr;
  int64_t jump_ = 0;
  int64_t l2_ = 0;
  int64_t l1_ = 0;
};

// While a part of a unit is read: in the next part, or in what is read after the unit, or null.
[[gnu::always_inline]] inline FetchAhead fetch_beyond(const MatmulUnit& unit, int part,
                                                      const uint8_t* next, FetchDistance distance) {
  if (part + 1 < unit.num_parts) next = weights_of(unit, part + 1);
  return {unit.parts[part].weight.group(2 * unit.index + groups_of(unit)), next, distance};
}

// The lines that lie ahead of one of a stream that nobody knows the end of.
[[gnu::always_inline]] inline void fetch_ahead(const uint8_t* line, FetchDistance distance) {
  if (distance.l2 > 0) __builtin_prefetch(line + distance.l2, 0, 2);
  if (distance.l1 > 0) __builtin_prefetch(line + distance.l1, 0, 3);
}

// Bytes of weights that a unit reads, at most.
[[gnu::always_inline]] inline int64_t unit_bytes(const ops::MatmulProblem& problem) {
  int64_t most = 0;
  for (int i = 0; i < problem.num_parts; ++i) {
    const int64_t bytes = 2 * problem.parts[i].weight.group_bytes;
    most = bytes > most ? bytes : most;
  }
  return problem.glu != ops::UnaryOp::none ? 2 * most : most;
}

// Chunks differ by one unit at most and are a multiple of the team. Small matrices: four or five a
// member, so that a late member costs little, but about 16 KB each, a third of a microsecond, so
// that claiming costs nothing. Large ones: 128 KB each.
[[gnu::always_inline]] inline int64_t count_chunks(const ops::MatmulProblem& problem, int64_t units,
                                                   int64_t team) {
  const int64_t bytes = units * unit_bytes(problem);
  const int64_t small = bytes >> 14 < 4 * team ? bytes >> 14 : 4 * team;
  const int64_t large = bytes >> 17;
  const int64_t wanted = small > large ? small : large;
  const int64_t chunks = (wanted / team + 1) * team;
  return chunks < units ? chunks : units;
}

// Units of a chunk.
struct UnitRange {
  int64_t first;
  int64_t end;
};

// each(chunk, unit, next) for the units of a member's chunks, where `next` is the weights that it
// reads after the unit's, or null: it claims its next chunk before it works on the one at hand.
template <class RangeOf, class Each>
void for_units(const ops::MatmulProblem& problem, Team& team, int64_t chunks, RangeOf&& range_of,
               Each&& each) {
  for (int64_t chunk = team.claim(); chunk < chunks;) {
    const int64_t following = team.claim();
    const UnitRange range = range_of(chunk);
    for (int64_t index = range.first; index < range.end; ++index) {
      int64_t next = index + 1;
      if (next == range.end) next = following < chunks ? range_of(following).first : -1;
      each(chunk, find_unit(problem, index, team.rank()),
           next < 0 ? nullptr : weights_of(find_unit(problem, next, team.rank()), 0));
    }
    chunk = following;
  }
}

}  // namespace effinfer::cpu
