// How the results of a tile over plain rows leave a block: folded into what came before, stored as
// partial results of a chunk, or divided and rounded into the rows of the output.
//
// A thread has 8 or 16 of the dims of row lane / 2. What it has summed so far lies in shared
// memory, in places of its own: the products need its registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/plain_products.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

template <class Unit, DType kType, int kDims>
class PlainResult {
 public:
  static constexpr int kWarps = PlainRows<kDims>::kWarps;
  static constexpr int kOwn = kDims / (2 * kWarps);
  using Totals = Quad[kOwn / 4][kWarps * kWarp];

  EFFINFER_DEVICE PlainResult(Unit& unit, const ops::AttentionProblem& p,
                              const ops::AttentionItem& item, const ops::AttentionTile& tile,
                              Totals& totals)
      : unit_(unit), p_(p), item_(item), tile_(tile), totals_(totals) {
    EFFINFER_UNROLL
    for (int d = 0; d < kOwn; d += 4) totals_[d / 4][unit.thread] = {};
  }

  EFFINFER_DEVICE int num_rows() const { return tile_.num_rows * tile_.num_heads; }
  EFFINFER_DEVICE int row() const { return unit_.lane / 2; }
  EFFINFER_DEVICE int dim() const { return (unit_.warp * 2 + unit_.lane % 2) * kOwn; }

  // What a chunk adds.
  EFFINFER_DEVICE void add(int32_t chunk, float max, float sum, const float (&values)[kOwn]) {
    if (item_.partial < 0) return fold(max, sum, values);
    const int64_t before = chunk - item_.first_unit / ops::kChunkUnits;
    if (row() < num_rows()) {
      store_partial(item_.partial + before * num_rows() + row(), max, sum, values);
    }
  }

  // All partial results of the tile, from left to right.
  EFFINFER_DEVICE void add_partials(const ops::AttentionMerge& merge) {
    for (int i = 0; i < merge.num_partials; ++i) {
      const int64_t index = merge.first_partial + int64_t{i} * num_rows() + row();
      float values[kOwn] = {};
      EFFINFER_UNROLL
      for (int d = 0; d < kOwn; d += 4) {
        if (dim() + d >= p_.v.dims) continue;
        const Quad quad = *reinterpret_cast<const Quad*>(p_.partial_out + partial_place(index) + d);
        EFFINFER_UNROLL
        for (int e = 0; e < 4; ++e) values[d + e] = float_of(quad.words[e]);
      }
      fold(p_.partial_ms[2 * index], p_.partial_ms[2 * index + 1], values);
    }
  }

  // A row that sees no key is zeros, and the logarithm of its sum minus infinity.
  EFFINFER_DEVICE void store() {
    if (row() >= num_rows()) return;
    const int64_t token = tile_.first_row + row() / tile_.num_heads;
    const int head = tile_.first_head + row() % tile_.num_heads;
    float scale = p_.v_scale;
    if (p_.sink_logits != nullptr) {
      const float sink = p_.sink_logits[head];
      const float highest = fmaxf(sink, max_);
      const float kept = plain_weight(max_, highest);
      sum_ = fmaf(sum_, kept, plain_weight(sink, highest));
      max_ = highest;
      scale *= kept;
    }
    if (p_.lse != nullptr && dim() == 0) {
      p_.lse[token * p_.num_qo_heads + head] =
          sum_ == 0.0f ? -INFINITY : (max_ + logf(sum_)) * p_.lse_factor;
    }
    const float factor = sum_ == 0.0f ? 0.0f : scale / sum_;
    auto* out = reinterpret_cast<uint16_t*>(p_.out) + token * p_.out_stride +
                int64_t{head} * p_.v.dims + dim();
    EFFINFER_UNROLL
    for (int d = 0; d < kOwn; d += 8) {
      if (dim() + d >= p_.v.dims) continue;
      Quad quad;
      EFFINFER_UNROLL
      for (int e = 0; e < 4; ++e) {
        const Quad& totals = totals_[(d + 2 * e) / 4][unit_.thread];
        const float low = float_of(totals.words[2 * e % 4]) * factor;
        const float high = float_of(totals.words[2 * e % 4 + 1]) * factor;
        quad.words[e] = kType == DType::f16 ? unit_.f16x2(low, high) : unit_.bf16x2(low, high);
      }
      *reinterpret_cast<Quad*>(out + d) = quad;
    }
  }

 private:
  EFFINFER_DEVICE void fold(float max, float sum, const float (&values)[kOwn]) {
    const float highest = fmaxf(max_, max);
    const float before = plain_weight(max_, highest);
    const float chunk = plain_weight(max, highest);
    max_ = highest;
    sum_ = fmaf(sum, chunk, fmaf(sum_, before, 0.0f));
    EFFINFER_UNROLL
    for (int d = 0; d < kOwn; d += 4) {
      Quad& quad = totals_[d / 4][unit_.thread];
      EFFINFER_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float scaled = fmaf(float_of(quad.words[e]), before, 0.0f);
        quad.words[e] = bits_of(fmaf(values[d + e], chunk, scaled));
      }
    }
  }

  EFFINFER_DEVICE int64_t partial_place(int64_t index) const {
    return index * ((p_.v.dims + 15) / 16 * 16) + dim();
  }

  EFFINFER_DEVICE void store_partial(int64_t index, float max, float sum,
                                     const float (&values)[kOwn]) const {
    EFFINFER_UNROLL
    for (int d = 0; d < kOwn; d += 4) {
      if (dim() + d >= p_.v.dims) continue;
      *reinterpret_cast<Quad*>(p_.partial_out + partial_place(index) + d) = {
          bits_of(values[d]), bits_of(values[d + 1]), bits_of(values[d + 2]),
          bits_of(values[d + 3])};
    }
    if (dim() != 0) return;
    p_.partial_ms[2 * index] = max;
    p_.partial_ms[2 * index + 1] = sum;
  }

  Unit& unit_;
  const ops::AttentionProblem& p_;
  const ops::AttentionItem& item_;
  const ops::AttentionTile& tile_;
  Totals& totals_;
  // Of the chunks so far: of the thread's own row.
  float max_ = kPlainNoScore;
  float sum_ = 0.0f;
};

}  // namespace effinfer::cuda
