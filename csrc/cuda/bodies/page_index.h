// Pages that a generated row visits, by what their keys' bounds allow of logits (ops/page_index.h):
// a block of threads a list. A warp has a page at a time: its lanes sum the higher of the products
// with the least and the greatest key, head by head of the group. Scores of several heads are
// joined as those of the CPU are; the highest are found by the search that sampling uses, and among
// equals the first ones are chosen.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float16.h"
#include "cuda/bodies/index_keys.h"
#include "cuda/bodies/page_bounds.h"
#include "cuda/bodies/row_search.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/page_index.h"

namespace effinfer::cuda {

struct PageIndexKernel {
  static constexpr const char* kName = "page_index";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMinBlocks = 1;       // what it has in shared memory allows no more
  static constexpr int kMostQueries = 8192;  // heads that share keys x dims
  static constexpr int kMostScores = 12288;  // heads that share keys x pages
  using Params = PageIndexParams;
  struct Shared {
    float queries[kMostQueries];
    float scores[kMostScores];
    RowExchange exchange;
    int32_t found;
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::PageIndexProblem& p = params.problem;
    const int32_t kv_head = unit.block % p.kv.num_kv_heads;
    const int64_t block = p.visits.num_blocks + unit.block / p.kv.num_kv_heads;
    const ops::VisitBlock row = p.visits.blocks[block];
    if (row.sequence < 0 || p.heads[kv_head] == ops::IndexedHead::other) return;
    PageIndex<Unit>(unit, p, shared, row, kv_head).run(p.visits.list(block, kv_head));
  }

 private:
  template <class Unit>
  class PageIndex {
   public:
    EFFINFER_DEVICE PageIndex(Unit& unit, const ops::PageIndexProblem& p, Shared& shared,
                              const ops::VisitBlock& row, int32_t kv_head)
        : unit_(unit),
          p_(p),
          shared_(shared),
          row_(row),
          kv_head_(kv_head),
          pages_(ops::candidates_of(p, row)),
          count_(static_cast<int>(pages_.count())),
          threads_(unit, shared.exchange) {}

    EFFINFER_DEVICE void run(uint64_t* words) {
      const bool all = p_.heads[kv_head_] == ops::IndexedHead::dense || ops::visits_all(p_, row_);
      const RowHead chosen = all ? RowHead{} : choose();
      // A tree's tokens lie behind each other, whatever their positions are.
      const int64_t slot =
          p_.batch.step_begin(row_.sequence) + row_.first_row - p_.batch.qo_indptr[row_.sequence];
      const int64_t own = row_.position / ops::kPageSize;
      for (int64_t i = unit_.thread; i <= slot / ops::kPageSize; i += kThreads) {
        const int64_t place = i - pages_.first;
        bool whole = all;
        if (!all && place >= 0 && place < count_) {
          whole = chosen.has(shared_.scores[place], static_cast<int>(place));
        }
        words[i] = whole ? ~uint64_t{0}
                         : always_visited(p_.sink_tokens, p_.local_tokens, row_, i) |
                               bits_of_word(i, (own - 1) * ops::kPageSize, slot + 1);
      }
    }

   private:
    EFFINFER_DEVICE RowHead choose() {
      constexpr RowHead kNone = {INFINITY, 0};
      const int64_t wanted = ops::chosen_units(p_, count_);
      if (wanted == 0) return kNone;
      const int size = p_.group() * p_.kv.head_dim;
      const float* q = p_.q + row_.first_row * p_.q_stride + int64_t{kv_head_} * size;
      for (int i = unit_.thread; i < size; i += kThreads) {
        shared_.queries[i] = unit_.mul(q[i], p_.sm_scale);
      }
      unit_.sync();
      for (int i = unit_.warp; i < count_; i += kRowWarps) score(i);
      unit_.sync();
      if (p_.group() > 1) join_heads();
      const KeyRange range{key_of(-INFINITY), key_of(INFINITY)};
      return RowList::head<false>(threads_, shared_.scores, count_, static_cast<double>(wanted),
                                  range, shared_.found);
    }

    // The highest logits that the page's keys may have.
    EFFINFER_DEVICE void score(int place) {
      const int32_t* ids = p_.batch.kv_indices + p_.batch.kv_indptr[row_.sequence];
      const int64_t page = unit_.load(ids + pages_.first + place);
      const int dims = p_.kv.head_dim;
      const uint16_t* least = p_.kv.bounds.of(page, kv_head_, p_.kv.num_kv_heads, dims);
      const uint16_t* most = least + dims;
      for (int head = 0; head < p_.group(); ++head) {
        const float* q = shared_.queries + head * dims;
        float sum = 0.0f;
        for (int d = 2 * unit_.lane; d < dims; d += 2 * kWarp) {
          const uint32_t low = unit_.load(reinterpret_cast<const uint32_t*>(least + d));
          const uint32_t high = unit_.load(reinterpret_cast<const uint32_t*>(most + d));
          EFFINFER_UNROLL
          for (int j = 0; j < 2; ++j) {
            const uint32_t bound = q[d + j] > 0.0f ? high : low;
            sum = fmaf(q[d + j], bf16_to_f32(static_cast<uint16_t>(bound >> 16 * j)), sum);
          }
        }
        sum = threads_.warp_sum(sum);
        if (unit_.lane == 0) shared_.scores[head * count_ + place] = sum;
      }
    }

    // Of each page the highest, each less the logarithm of its head's sum of exponentials.
    EFFINFER_DEVICE void join_heads() {
      for (int head = unit_.warp; head < p_.group(); head += kRowWarps) {
        float* const scores = shared_.scores + head * count_;
        float max = -INFINITY;
        for (int i = unit_.lane; i < count_; i += kWarp) max = fmaxf(max, scores[i]);
        EFFINFER_UNROLL
        for (int mask = 1; mask < kWarp; mask *= 2) max = fmaxf(max, unit_.shfl_xor(max, mask));
        float sum = 0.0f;
        for (int i = unit_.lane; i < count_; i += kWarp) {
          sum += unit_.exp2(rounded_product(scores[i] - max, kLog2e));
        }
        const float own = max + logf(threads_.warp_sum(sum));
        for (int i = unit_.lane; i < count_; i += kWarp) scores[i] -= own;
      }
      unit_.sync();
      for (int i = unit_.thread; i < count_; i += kThreads) {
        for (int head = 1; head < p_.group(); ++head) {
          shared_.scores[i] = fmaxf(shared_.scores[i], shared_.scores[head * count_ + i]);
        }
      }
    }

    Unit& unit_;
    const ops::PageIndexProblem& p_;
    Shared& shared_;
    const ops::VisitBlock& row_;
    const int32_t kv_head_;
    const ops::PageCandidates pages_;
    const int count_;
    RowBlock<Unit> threads_;
  };
};

}  // namespace effinfer::cuda
