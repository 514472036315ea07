// The second half of choosing columns and slashes, after column_scores.h: a block of threads for
// each head finds the end of the highest scores of its keys, another of its distances, and writes
// them as sets; then a block of each list joins the sets of its heads.
//
// A row of a block visits the keys at a chosen distance behind it: token t if the distance of any
// of the block's rows from it is chosen, which is a window over the set of distances.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/column_tile.h"
#include "cuda/bodies/row_heads.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

struct ColumnChoiceKernel {
  static constexpr const char* kName = "column_choice";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMinBlocks = 1;
  using Params = ColumnParams;
  struct Shared {
    RowFilterShared filter;
    RowExchange exchange;
    RowRing ring;
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::ColumnIndexProblem& p = params.problem;
    const bool is_columns = unit.block % 2 == 0;
    const int64_t head = unit.block / 2 % p.in.num_qo_heads;
    const int64_t place = unit.block / 2 / p.in.num_qo_heads;
    const int64_t sequence = p.in.visits.sequences[params.first + place].sequence;
    const TopScores& top = is_columns ? p.columns : p.slashes;
    const int64_t group = p.in.num_qo_heads / p.in.kv.num_kv_heads;
    if (!ops::chooses_any(top) || !chooses_columns(p, sequence, head / group)) return;
    const ColumnArrays arrays = ColumnArrays::of(params, place, head);
    const int length = p.in.batch.kv_len[sequence];
    const float* scores = is_columns ? arrays.columns : arrays.diagonals;
    const RowHead chosen = choose(unit, shared, scores, length, top);
    write(unit, scores, length, chosen, is_columns, is_columns ? arrays.keys : arrays.distances);
  }

 private:
  template <class Unit>
  class Search : public RowHeads<RowValues, Unit> {
   public:
    using Base = RowHeads<RowValues, Unit>;
    using Base::Base;
    EFFINFER_DEVICE RowHead by_count(int count) { return this->value_head(count); }
    EFFINFER_DEVICE RowHead by_mass() {
      if (!this->weigh_head()) this->weigh_head_exactly();
      return this->weights_;
    }
  };

  // Behind the sequence the last page has zeros, which come after all of its keys. Nothing is
  // chosen of scores with NaNs.
  template <class Unit>
  EFFINFER_DEVICE static RowHead choose(Unit& unit, Shared& shared, const float* scores, int length,
                                        const TopScores& top) {
    constexpr RowHead kNone = {INFINITY, 0};
    RowBlock<Unit> block(unit, shared.exchange);
    const auto values = RowValues::of(scores, (length + 3) / 4 * 4, true, shared.ring);
    RowPasses<RowValues, Unit> passes(block, values, shared.filter.parts, false);
    const RowExtent extent = passes.extent();
    if (extent.has_nan) return kNone;
    RowLimits limits;
    limits.top_p = top.mass;
    Search<Unit> search(block, passes, shared.filter, extent, limits);
    if (top.mass > 0.0f) {
      return static_cast<double>(top.mass) * extent.total > 0.0 ? search.by_mass() : kNone;
    }
    return top.count < length ? search.by_count(top.count) : RowHead{};
  }

  // A warp a word.
  template <class Unit>
  EFFINFER_DEVICE static void write(Unit& unit, const float* scores, int length,
                                    const RowHead& chosen, bool is_columns, uint64_t* words) {
    for (int word = unit.warp; word < (length + 63) / 64; word += kRowWarps) {
      uint32_t bits[2];
      EFFINFER_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int element = 64 * word + kWarp * half + unit.lane;
        const int index = is_columns ? element : length - 1 - element;
        const bool in = element < length && chosen.has(unit.load(scores + index), index);
        bits[half] = unit.ballot(in);
      }
      if (unit.lane == 0) words[word] = uint64_t{bits[1]} << 32 | bits[0];
    }
  }
};

struct ColumnListsKernel {
  static constexpr const char* kName = "column_lists";
  static constexpr int kThreads = 128;
  using Params = ColumnParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared&) {
    const ops::ColumnIndexProblem& p = params.problem;
    const int64_t kv_head = unit.block % p.in.kv.num_kv_heads;
    const int64_t index = unit.block / p.in.kv.num_kv_heads;
    if (p.in.heads[kv_head] == ops::IndexedHead::other) return;
    const ops::VisitBlock block = p.in.visits.blocks[index];
    const bool all = visits_all(p, block.sequence, kv_head);
    int64_t place = 0;
    if (!all && chooses_any(p)) {
      place = sequence_of(params, index);
      if (place < 0) return;
    }
    uint64_t* const list = p.in.visits.list(index, kv_head);
    const int words = (block.position + block.num_rows - 1) / 64 + 1;
    for (int word = unit.thread; word < words; word += kThreads) {
      uint64_t visited = ~uint64_t{0};
      if (!all) {
        visited =
            always_visited(p.in, block, word) | chosen(unit, params, block, place, kv_head, word);
      }
      list[word] = visited;
    }
  }

 private:
  EFFINFER_DEVICE static bool chooses_any(const ops::ColumnIndexProblem& p) {
    return ops::chooses_any(p.columns) || ops::chooses_any(p.slashes);
  }

  // The place, from params.first on, of the sequence that has a list's block, or -1: its sets are
  // not there at this time.
  EFFINFER_DEVICE static int64_t sequence_of(const Params& params, int64_t block) {
    const ops::VisitPlan& visits = params.problem.in.visits;
    for (int64_t i = 0; i < visits.score_sequences && params.first + i < visits.num_sequences;
         ++i) {
      const ops::VisitSequence sequence = visits.sequences[params.first + i];
      const int64_t offset = block - sequence.first_block;
      if (offset >= 0 && offset < sequence.num_blocks) return i;
    }
    return -1;
  }

  // Of a word of keys, by any head of the group.
  template <class Unit>
  EFFINFER_DEVICE static uint64_t chosen(Unit& unit, const Params& params,
                                         const ops::VisitBlock& block, int64_t place,
                                         int64_t kv_head, int word) {
    const ops::ColumnIndexProblem& p = params.problem;
    const int group = p.in.num_qo_heads / p.in.kv.num_kv_heads;
    uint64_t visited = 0;
    for (int i = 0; i < group; ++i) {
      const ColumnArrays arrays = ColumnArrays::of(params, place, kv_head * group + i);
      if (ops::chooses_any(p.columns)) visited |= unit.load(arrays.keys + word);
      if (ops::chooses_any(p.slashes)) visited |= at_distances(unit, arrays.distances, block, word);
    }
    return visited;
  }

  // Bits [begin, begin + 64) of a set of `words` words, zeros beyond both ends.
  template <class Unit>
  EFFINFER_DEVICE static uint64_t slice(Unit& unit, const uint64_t* set, int words, int begin) {
    const int word = begin >> 6;
    const int shift = begin & 63;
    const auto at = [&](int i) { return i >= 0 && i < words ? unit.load(set + i) : uint64_t{0}; };
    return shift == 0 ? at(word) : at(word) >> shift | at(word + 1) << (64 - shift);
  }

  // Key 64 word + j lies the distance first + 63 - j behind the block's first row, and one more
  // behind each that follows: bits from 63 - j on, as many as there are rows.
  template <class Unit>
  EFFINFER_DEVICE static uint64_t at_distances(Unit& unit, const uint64_t* distances,
                                               const ops::VisitBlock& block, int word) {
    const int first = block.position - 64 * word - 63;
    const int words = (block.position + block.num_rows - 1) / 64 + 1;
    uint64_t low = slice(unit, distances, words, first);
    uint64_t high = slice(unit, distances, words, first + 64);
    if ((low | high) == 0) return 0;
    for (int reached = 1; reached < block.num_rows;) {
      const int more = 2 * reached <= block.num_rows ? reached : block.num_rows - reached;
      low |= low >> more | high << (64 - more);
      high |= high >> more;
      reached += more;
    }
    return reversed(low);
  }

  EFFINFER_DEVICE static uint64_t reversed(uint64_t bits) {
    uint64_t mask = ~uint64_t{0};
    EFFINFER_UNROLL
    for (int n = 32; n > 0; n /= 2) {
      mask ^= mask << n;
      bits = (bits >> n & mask) | (bits << n & ~mask);
    }
    return bits;
  }
};

}  // namespace effinfer::cuda
