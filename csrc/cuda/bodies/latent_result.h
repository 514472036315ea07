// How the results of a tile of latent attention leave a warp: folded into what came before, stored
// as partial results of a chunk, or divided and rounded into the rows of the output.
//
// A warp has 16 rows and 128 dims as products leave them: lane = 4 c + q has of rows c and c + 8
// the dims 8 n + 2 q and the next one.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/plain_products.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kLatentOwnDims = 128;  // of a warp

template <class Unit, DType kType>
class LatentResult {
 public:
  using Values = float[kLatentOwnDims / 8][4];

  EFFINFER_DEVICE LatentResult(Unit& unit, const ops::AttentionProblem& p,
                               const ops::AttentionItem& item, const ops::AttentionTile& tile,
                               int first_row, int first_dim)
      : unit_(unit),
        p_(p),
        item_(item),
        tile_(tile),
        first_row_(first_row + unit.lane / 4),
        first_dim_(first_dim + unit.lane % 4 * 2) {}

  // What a chunk adds.
  EFFINFER_DEVICE void add(int32_t chunk, const float (&max)[2], const float (&sum)[2],
                           const Values& values) {
    const int64_t before = chunk - item_.first_unit / ops::kChunkUnits;
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (item_.partial < 0) {
        fold(r, max[r], sum[r], [&](int n, int e) { return values[n][2 * r + e]; });
      } else if (row(r) < num_rows()) {
        store_partial(r, item_.partial + before * num_rows() + row(r), max[r], sum[r], values);
      }
    }
  }

  // All partial results of the tile, from left to right.
  EFFINFER_DEVICE void add_partials(const ops::AttentionMerge& merge) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (row(r) >= num_rows()) continue;
      for (int i = 0; i < merge.num_partials; ++i) {
        const int64_t index = merge.first_partial + int64_t{i} * num_rows() + row(r);
        const float* from = p_.partial_out + partial_place(index);
        fold(r, p_.partial_ms[2 * index], p_.partial_ms[2 * index + 1],
             [&](int n, int e) { return has(n) ? from[8 * n + e] : 0.0f; });
      }
    }
  }

  // A row that sees no key is zeros, and the logarithm of its sum minus infinity.
  EFFINFER_DEVICE void store() {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (row(r) >= num_rows()) continue;
      const int64_t token = tile_.first_row + row(r) / tile_.num_heads;
      const int head = tile_.first_head + row(r) % tile_.num_heads;
      float scale = p_.v_scale;
      if (p_.sink_logits != nullptr) {
        const float sink = p_.sink_logits[head];
        const float highest = fmaxf(sink, max_[r]);
        const float kept = plain_weight(max_[r], highest);
        sum_[r] = fmaf(sum_[r], kept, plain_weight(sink, highest));
        max_[r] = highest;
        scale *= kept;
      }
      const bool none = sum_[r] == 0.0f;
      if (p_.lse != nullptr && first_dim_ == 0) {
        p_.lse[token * p_.num_qo_heads + head] =
            none ? -INFINITY : (max_[r] + logf(sum_[r])) * p_.lse_factor;
      }
      const float factor = none ? 0.0f : scale / sum_[r];
      auto* out = reinterpret_cast<uint16_t*>(p_.out) + token * p_.out_stride +
                  int64_t{head} * p_.v.dims + first_dim_;
      EFFINFER_UNROLL
      for (int n = 0; n < kLatentOwnDims / 8; ++n) {
        if (!has(n)) continue;
        const float low = totals_[n][2 * r] * factor;
        const float high = totals_[n][2 * r + 1] * factor;
        *reinterpret_cast<uint32_t*>(out + 8 * n) =
            kType == DType::f16 ? unit_.f16x2(low, high) : unit_.bf16x2(low, high);
      }
    }
  }

 private:
  EFFINFER_DEVICE int num_rows() const { return tile_.num_rows * tile_.num_heads; }
  EFFINFER_DEVICE int row(int r) const { return first_row_ + 8 * r; }
  EFFINFER_DEVICE bool has(int n) const { return first_dim_ + 8 * n < p_.v.dims; }

  template <class ValueOf>
  EFFINFER_DEVICE void fold(int r, float max, float sum, ValueOf&& value_of) {
    const float highest = fmaxf(max_[r], max);
    const float before = plain_weight(max_[r], highest);
    const float chunk = plain_weight(max, highest);
    max_[r] = highest;
    sum_[r] = fmaf(sum, chunk, fmaf(sum_[r], before, 0.0f));
    EFFINFER_UNROLL
    for (int n = 0; n < kLatentOwnDims / 8; ++n) {
      EFFINFER_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& total = totals_[n][2 * r + e];
        total = fmaf(value_of(n, e), chunk, fmaf(total, before, 0.0f));
      }
    }
  }

  EFFINFER_DEVICE int64_t partial_place(int64_t index) const {
    return index * ((p_.v.dims + 15) / 16 * 16) + first_dim_;
  }

  EFFINFER_DEVICE void store_partial(int r, int64_t index, float max, float sum,
                                     const Values& values) const {
    float* to = p_.partial_out + partial_place(index);
    EFFINFER_UNROLL
    for (int n = 0; n < kLatentOwnDims / 8; ++n) {
      if (!has(n)) continue;
      to[8 * n] = values[n][2 * r];
      to[8 * n + 1] = values[n][2 * r + 1];
    }
    if (first_dim_ != 0) return;
    p_.partial_ms[2 * index] = max;
    p_.partial_ms[2 * index + 1] = sum;
  }

  Unit& unit_;
  const ops::AttentionProblem& p_;
  const ops::AttentionItem& item_;
  const ops::AttentionTile& tile_;
  const int first_row_;
  const int first_dim_;
  // Of the chunks so far.
  float max_[2] = {kPlainNoScore, kPlainNoScore};
  float sum_[2] = {};
  Values totals_ = {};
};

}  // namespace effinfer::cuda
