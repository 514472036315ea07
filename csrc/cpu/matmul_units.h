// How a matmul is cut. A unit is 32 outputs of one part (two row groups, one block of an int8
// operand), or of both parts of a GLU. Units of all parts form one sequence, which a team shares by
// claiming chunks. Nothing that a unit computes depends on the cut.
#pragma once

#include <cstdint>

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

// How far ahead of an int8 kernel its weights are asked for, into L2: an L1 that fills up stalls
// the arithmetic. With few tokens the stream runs at the speed of memory, and just ahead of the
// hardware's own prefetching is best; with more, arithmetic gives memory time to come from afar.
inline constexpr int64_t prefetch_distance(int tokens) {
  return tokens <= 2 ? 512 : 8192;
}

// Where to fetch ahead while a member reads a stream of weights: up to the stream's end, then in
// what it reads next.
class FetchAhead {
 public:
  FetchAhead(const uint8_t* end, const uint8_t* next, int64_t distance)
      : limit_(end - distance), distance_(distance), jump_(next == nullptr ? 0 : next - end) {}
  [[gnu::always_inline]] const uint8_t* from(const uint8_t* data) const {
    return data + distance_ + (data < limit_ ? 0 : jump_);
  }

 private:
  const uint8_t* limit_;
  int64_t distance_;
  int64_t jump_;
};

// Bytes of weights that a unit reads, at most.
[[gnu::always_inline]] inline int64_t unit_bytes(const ops::MatmulProblem& problem) {
  int64_t most = 0;
  for (int i = 0; i < problem.num_parts; ++i) {
    const int64_t bytes = 2 * problem.parts[i].weight.group_bytes;
    most = bytes > most ? bytes : most;
  }
  return problem.glu != ops::UnaryOp::none ? 2 * most : most;
}

}  // namespace effinfer::cpu
