// What a row gives the whole pages that it visits (ops/history_index.h), by the threads of a block:
// of a page the highest probability that any query head gives any of its keys. A warp has a page at
// a time, a lane two of its keys.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/key_products.h"
#include "cuda/bodies/row_sum.h"
#include "cuda/bodies/softmax.h"
#include "cuda/bodies/tiled_queries.h"
#include "cuda/unit.h"
#include "ops/history_index.h"

namespace effinfer::cuda {

// Where a KV head's pages of a sequence are, and what the threads of a block hand to each other.
struct HistoryPages {
  const ops::PageIndexProblem& p;
  int64_t head_bytes;  // of a KV head's page
  const int32_t* ids;
  int32_t kv_head;
  const TiledQueries& queries;  // scaled
  float* log_sums;              // of each head's exponentials, in shared memory
  float* bests;                 // [group][stride]: of each page the highest logit, and such a sum
  int64_t stride;
};

template <class Unit>
class HistoryScores {
 public:
  static constexpr int kHeads = TiledQueries::kHeads;

  EFFINFER_DEVICE HistoryScores(Unit& unit, const HistoryPages& pages) : unit_(unit), of_(pages) {}

  // Of each query head the highest logit of a page's keys, and their exponentials, by a warp.
  EFFINFER_DEVICE void score_keys(int64_t page) {
    const ops::KvLayer& kv = of_.p.kv;
    const int64_t place = unit_.load(of_.ids + page) * int64_t{kv.num_kv_heads} + of_.kv_head;
    const AnyKeyLine line_of(kv);
    EFFINFER_NO_UNROLL
    for (int head = 0; head < of_.p.group(); head += kHeads) {
      float x[2][kHeads] = {};
      EFFINFER_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int token = half * kWarp + unit_.lane;
        const uint32_t* from = line_of.first(kv.k + place * of_.head_bytes, token);
        for (int line = 0; line < line_of.lines(); ++line) {
          line_of.add(unit_, from, line, of_.queries.of(head, kv.head_dim), x[half]);
        }
        const float scale = line_of.scale(unit_, kv, place, token);
        EFFINFER_UNROLL
        for (int i = 0; i < kHeads; ++i) x[half][i] = unit_.mul(x[half][i], scale);
      }
      EFFINFER_UNROLL
      for (int i = 0; i < kHeads; ++i) {
        const float best = warp_max(fmaxf(x[0][i], x[1][i]));
        const float sum = warp_sum(unit_, weight(x[0][i], best) + weight(x[1][i], best));
        if (unit_.lane != 0 || head + i >= of_.p.group()) continue;
        best_of(head + i, page)[0] = best;
        best_of(head + i, page)[1] = sum;
      }
    }
  }

  // Behind a barrier: the logarithm of a head's sum over the whole pages that are visited, by a
  // warp.
  EFFINFER_DEVICE void join_pages(int head, const uint64_t* words, int64_t whole) {
    float highest = kNoScore;
    EFFINFER_NO_UNROLL
    for (int64_t page = unit_.lane; page < whole; page += kWarp) {
      if (words[page] == ~uint64_t{0}) highest = fmaxf(highest, best_of(head, page)[0]);
    }
    highest = warp_max(highest);
    float sum = 0.0f;
    EFFINFER_NO_UNROLL
    for (int64_t page = unit_.lane; page < whole; page += kWarp) {
      if (words[page] != ~uint64_t{0}) continue;
      const float* best = best_of(head, page);
      sum += rounded_product(best[1], weight(best[0], highest));
    }
    sum = warp_sum(unit_, sum);
    if (unit_.lane == 0) of_.log_sums[head] = highest + logf(sum);
  }

  // Behind another one: a page's score.
  EFFINFER_DEVICE float score_of(int64_t page) const {
    float highest = 0.0f;
    EFFINFER_NO_UNROLL
    for (int head = 0; head < of_.p.group(); ++head) {
      const float log = best_of(head, page)[0] - of_.log_sums[head];
      highest = fmaxf(highest, ops::kLeastLog + rounded_product(log, kLog2e));
    }
    return highest;
  }

 private:
  EFFINFER_DEVICE float* best_of(int head, int64_t page) const {
    return of_.bests + head * of_.stride + page * ops::kHistoryPageScores;
  }
  EFFINFER_DEVICE float weight(float x, float reference) {
    return unit_.exp2(rounded_product(x - reference, kLog2e));
  }
  EFFINFER_DEVICE float warp_max(float x) {
    EFFINFER_UNROLL
    for (int mask = 1; mask < kWarp; mask *= 2) x = fmaxf(x, unit_.shfl_xor(x, mask));
    return x;
  }

  Unit& unit_;
  const HistoryPages of_;
};

}  // namespace effinfer::cuda
