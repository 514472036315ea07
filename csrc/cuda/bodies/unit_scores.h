// Scores of the units that a generated row chooses from (ops/page_index.h), of each query head of a
// KV head: by bounds, by means, or of windows of two means. A warp has a unit at a time, whose
// numbers its lanes hold while the heads go by.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "cuda/bodies/page_bounds.h"
#include "cuda/bodies/row_sum.h"
#include "cuda/bodies/tiled_queries.h"
#include "cuda/unit.h"
#include "ops/page_index.h"

namespace effinfer::cuda {

struct UnitScoresKernel {
  static constexpr const char* kName = "unit_scores";
  static constexpr int kThreads = 256;
  static constexpr int kUnits = 256;  // of a block
  using Params = PageIndexParams;
  struct Shared {
    alignas(8) float queries[TiledQueries::kMostNumbers];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::PageIndexProblem& p = params.problem;
    const int of_page = static_cast<int>(ops::kPageSize / p.summary_unit());
    const OwnUnits<kUnits> own_units(params, unit.block, of_page);
    if (own_units.none()) return;
    const int32_t kv_head = own_units.kv_head;
    // A window's mean is half of either unit's.
    const float scale = p.has_windows() ? 0.5f * p.sm_scale : p.sm_scale;
    const int size = p.group() * p.kv.head_dim;
    const float* q = p.q + own_units.row.first_row * p.q_stride + int64_t{kv_head} * size;
    for (int i = unit.thread; i < size; i += kThreads) {
      shared.queries[i] = unit.mul(unit.load(q + i), scale);
    }
    unit.sync();
    float* const scores = params.scores(own_units.index, kv_head);
    EFFINFER_NO_UNROLL
    for (int i = own_units.first + unit.warp; i < own_units.end; i += kThreads / kWarp) {
      const uint16_t* own = numbers(unit, p, own_units.ids, kv_head, of_page, i);
      const uint16_t* other = own + p.kv.head_dim;  // the greatest
      if (p.has_windows()) {
        const int next = i + 1 < own_units.count ? i + 1 : i;
        other = numbers(unit, p, own_units.ids, kv_head, of_page, next);
      }
      score(unit, p, shared, own, other, scores + i, params.score_stride());
    }
  }

 private:
  static constexpr int kPairs = TiledQueries::kMostDims / 2 / kWarp;  // of a lane

  template <class Unit>
  EFFINFER_DEVICE static const uint16_t* numbers(Unit& unit, const ops::PageIndexProblem& p,
                                                 const int32_t* ids, int32_t kv_head, int of_page,
                                                 int index) {
    const uint16_t* page =
        p.kv.bounds.of(unit.load(ids + index / of_page), kv_head, p.kv.num_kv_heads, p.kv.head_dim);
    return page + index % of_page * p.summary_vectors() * p.kv.head_dim;
  }

  // By bounds the higher product counts, of windows both do.
  template <class Unit>
  EFFINFER_DEVICE static void score(Unit& unit, const ops::PageIndexProblem& p,
                                    const Shared& shared, const uint16_t* own,
                                    const uint16_t* other, float* to, int64_t stride) {
    const int dims = p.kv.head_dim;
    const bool both = p.has_windows();
    const bool bounds = !p.means;
    uint32_t low[kPairs] = {};
    uint32_t high[kPairs] = {};
    EFFINFER_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const int d = 2 * (i * kWarp + unit.lane);
      if (d >= dims) continue;
      low[i] = unit.load(reinterpret_cast<const uint32_t*>(own + d));
      if (bounds || both) high[i] = unit.load(reinterpret_cast<const uint32_t*>(other + d));
    }
    EFFINFER_NO_UNROLL
    for (int head = 0; head < p.group(); ++head) {
      float sum = 0.0f;
      EFFINFER_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        const int d = 2 * (i * kWarp + unit.lane);
        if (d >= dims) continue;
        EFFINFER_UNROLL
        for (int j = 0; j < 2; ++j) {
          const float q = shared.queries[head * dims + d + j];
          const float least = bf16_to_f32(static_cast<uint16_t>(low[i] >> 16 * j));
          const float most = bf16_to_f32(static_cast<uint16_t>(high[i] >> 16 * j));
          sum = fmaf(q, bounds && q > 0.0f ? most : least, sum);
          if (both) sum = fmaf(q, most, sum);
        }
      }
      sum = warp_sum(unit, sum);
      if (unit.lane == 0) to[head * stride] = sum;
    }
  }
};

}  // namespace effinfer::cuda
