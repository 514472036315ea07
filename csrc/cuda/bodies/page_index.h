// What a generated row visits, by the scores of units that unit_scores.h or unit_keys.h have
// written: a block of threads a list. The highest are found by a search in the order of floats, and
// among equals the first ones are chosen. Nothing is chosen of scores with NaNs.
//
// Where rows visit what those before them have chosen (ops/kept_choice.h) a block has the lists of
// a sequence's rows, one after the other.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/index_keys.h"
#include "cuda/bodies/kept_choice.h"
#include "cuda/bodies/page_bounds.h"
#include "cuda/bodies/row_search.h"
#include "cuda/bodies/sequence_planes.h"
#include "cuda/bodies/softmax.h"
#include "cuda/bodies/tiled_queries.h"
#include "cuda/bodies/voted_scores.h"
#include "cuda/unit.h"
#include "ops/page_index.h"

namespace effinfer::cuda {

struct PageIndexKernel {
  static constexpr const char* kName = "page_index";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMinBlocks = 1;  // the search is worth its registers
  using Params = PageIndexParams;
  struct Shared {
    RowExchange exchange;
    int32_t found;
    float log_sums[TiledQueries::kMostHeads];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::PageIndexProblem& p = params.problem;
    const int32_t kv_head = unit.block % p.kv.num_kv_heads;
    const int64_t place = unit.block / p.kv.num_kv_heads;
    if (p.heads[kv_head] == ops::IndexedHead::other) return;
    int64_t first = p.visits.num_blocks + params.first_row + place;
    int32_t rows = 1;
    float* plane = nullptr;
    if (p.reuse > 0.0f) {
      first = p.visits.first_block[place];
      if (first < 0 || !ops::has_row_lists(p.batch, place)) return;
      rows = p.batch.qo_indptr[place + 1] - p.batch.qo_indptr[place];
      if (!p.batch.is_tree(place)) plane = plane_of(p.planes, place, kv_head);
    }
    EFFINFER_NO_UNROLL
    for (int64_t block = first; block < first + rows; ++block) {
      const int64_t row = block - p.visits.num_blocks - params.first_row;
      if (row < 0 || row >= params.num_rows || p.visits.blocks[block].sequence < 0) continue;
      PageIndex<Unit>(unit, params, shared, block, kv_head).run(plane);
      if (rows > 1) unit.sync();
    }
  }

 private:
  template <class Unit>
  class PageIndex {
   public:
    EFFINFER_DEVICE PageIndex(Unit& unit, const Params& params, Shared& shared, int64_t block,
                              int32_t kv_head)
        : unit_(unit),
          params_(params),
          p_(params.problem),
          shared_(shared),
          block_(block),
          row_(p_.visits.blocks[block]),
          kv_head_(kv_head),
          pages_(ops::candidates_of(p_, row_)),
          threads_(unit, shared.exchange) {}

    // With a plane, or null, of what rows before have chosen.
    EFFINFER_DEVICE void run(float* plane) {
      if (!chooses_units(p_, row_, kv_head_)) {
        EFFINFER_NO_UNROLL
        for (int64_t i = unit_.thread; i < num_words(); i += kThreads) words()[i] = ~uint64_t{0};
        return;
      }
      const int size = p_.group() * p_.kv.head_dim;
      KeptChoice<Unit> kept(threads_, plane, p_.q + row_.first_row * p_.q_stride + kv_head_ * size,
                            size, row_.position);
      const bool held = p_.reuse > 0.0f && kept.holds(p_.reuse);
      const RowHead head = held ? RowHead{} : choose();
      EFFINFER_NO_UNROLL
      for (int64_t i = unit_.warp; i < num_words(); i += kRowWarps) {
        const int64_t place = i - pages_.first;
        const bool candidate = place >= 0 && place < pages_.count();
        uint64_t chosen = 0;
        if (candidate) chosen = held ? kept.word(i) : word_of(head, place);
        if (unit_.lane != 0) continue;
        if (candidate && !held) kept.keep_word(i, chosen);
        words()[i] = chosen | always(i);
      }
      if (plane != nullptr) kept.end(held);
    }

   private:
    EFFINFER_DEVICE uint64_t* words() const { return p_.visits.list(block_, kv_head_); }
    // A tree's tokens lie behind each other, whatever their positions are.
    EFFINFER_DEVICE int64_t slot() const {
      return p_.batch.step_begin(row_.sequence) + row_.first_row -
             p_.batch.qo_indptr[row_.sequence];
    }
    EFFINFER_DEVICE int64_t num_words() const { return slot() / ops::kPageSize + 1; }

    EFFINFER_DEVICE uint64_t always(int64_t word) const {
      const int64_t own = row_.position / ops::kPageSize;
      return always_visited(p_.sink_tokens, p_.local_tokens, row_, word) |
             bits_of_word(word, ops::first_shown(p_.window_left, row_),
                          pages_.first * ops::kPageSize) |
             bits_of_word(word, (own - 1) * ops::kPageSize, slot() + 1);
    }

    EFFINFER_DEVICE float* joined() const {
      return params_.scores(block_ - p_.visits.num_blocks, kv_head_) +
             p_.group() * params_.score_stride();
    }

    EFFINFER_DEVICE RowHead choose() {
      constexpr RowHead kNone = {INFINITY, 0};
      const int units = static_cast<int>(pages_.count() * (ops::kPageSize / p_.unit));
      const auto wanted = static_cast<int>(ops::chosen_units(p_, units));
      if (wanted == 0) return kNone;
      VotedScores scores;
      scores.scores = params_.scores(block_ - p_.visits.num_blocks, kv_head_);
      scores.stride = params_.score_stride();
      scores.log_sums = shared_.log_sums;
      scores.group = p_.group();
      scores.adds = p_.vote == ops::HeadVote::sum;
      scores.windows = p_.has_windows();
      scores.size = units;
      if (p_.group() > 1) set_log_sums(scores);
      float* const to = joined();
      float highest = -INFINITY;
      bool has_nan = false;
      EFFINFER_NO_UNROLL
      for (int i = unit_.thread; i < units; i += kThreads) {
        to[i] = scores.at(unit_, i);
        has_nan = has_nan || to[i] != to[i];
        highest = fmaxf(highest, to[i]);
      }
      // Behind which all scores are there. As integers, which maxima of the block are: the sign bit
      // flipped.
      int keys[2] = {static_cast<int>(key_of(highest) ^ 0x80000000u), has_nan ? 1 : 0};
      threads_.max(keys);
      if (keys[1] != 0) return kNone;
      return head_of(to, units, wanted, static_cast<uint32_t>(keys[0]) ^ 0x80000000u);
    }

    // The `wanted` highest of scores that this kernel has written, by passes over them: other
    // searches (row_heads.h) take fewer, and several times as much code.
    EFFINFER_DEVICE RowHead head_of(const float* scores, int size, int wanted, uint32_t highest) {
      const int warps = RowList::warps_of(size);
      KeyRange range{key_of(-INFINITY), highest};
      while (!range.is_one()) {
        float pivots[kPivots];
        int counts[kPivots] = {};
        EFFINFER_UNROLL
        for (int j = 0; j < kPivots; ++j) pivots[j] = value_of(range.pivot(j));
        for (int i = unit_.thread; i < size; i += kThreads) {
          const float score = scores[i];
          EFFINFER_UNROLL
          for (int j = 0; j < kPivots; ++j) counts[j] += score >= pivots[j] ? 1 : 0;
        }
        threads_.sum(counts, warps);
        const KeyRange old = range;
        EFFINFER_UNROLL
        for (int j = 0; j < kPivots; ++j) {
          const bool reached = counts[j] >= wanted;
          range.tell(old.pivot(j), reached, !reached);
          // These alone: no other one is equal to the least of them.
          if (counts[j] == wanted) range.high = range.low;
        }
      }
      const float least = value_of(range.low);
      int counts[2] = {};  // above it, and equal
      for (int i = unit_.thread; i < size; i += kThreads) {
        const float score = scores[i];
        counts[0] += score > least ? 1 : 0;
        counts[1] += score == least ? 1 : 0;
      }
      threads_.sum(counts, warps);
      const HeadEnd end = head_end<false>(least, counts[0], counts[1], wanted);
      return {least, RowList::ties_end(threads_, scores, size, end, shared_.found,
                                       [](int place) { return place; })};
    }

    // The logarithm of each head's sum of exponentials.
    EFFINFER_DEVICE void set_log_sums(const VotedScores& scores) {
      const int count = scores.count();
      EFFINFER_NO_UNROLL
      for (int head = unit_.warp; head < p_.group(); head += kRowWarps) {
        const float* own = scores.scores + head * scores.stride;
        float max = -INFINITY;
        EFFINFER_NO_UNROLL
        for (int i = unit_.lane; i < count; i += kWarp) max = fmaxf(max, unit_.load(own + i));
        EFFINFER_UNROLL
        for (int mask = 1; mask < kWarp; mask *= 2) max = fmaxf(max, unit_.shfl_xor(max, mask));
        float sum = 0.0f;
        EFFINFER_NO_UNROLL
        for (int i = unit_.lane; i < count; i += kWarp) {
          sum += unit_.exp2(rounded_product(unit_.load(own + i) - max, kLog2e));
        }
        sum = threads_.warp_sum(sum);
        if (unit_.lane == 0) shared_.log_sums[head] = max + logf(sum);
      }
      unit_.sync();
    }

    // What is chosen of a candidate page.
    EFFINFER_DEVICE uint64_t word_of(const RowHead& head, int64_t place) {
      const float* const scores = joined();
      uint32_t bits[2];
      EFFINFER_UNROLL
      for (int half = 0; half < 2; ++half) {
        const auto key = static_cast<int>(place * ops::kPageSize) + kWarp * half + unit_.lane;
        const int index = key / p_.unit;
        bits[half] = unit_.ballot(head.least < INFINITY && head.has(scores[index], index));
      }
      return uint64_t{bits[1]} << 32 | bits[0];
    }

    Unit& unit_;
    const Params& params_;
    const ops::PageIndexProblem& p_;
    Shared& shared_;
    const int64_t block_;
    const ops::VisitBlock& row_;
    const int32_t kv_head_;
    const ops::PageCandidates pages_;
    RowBlock<Unit> threads_;
  };
};

}  // namespace effinfer::cuda
