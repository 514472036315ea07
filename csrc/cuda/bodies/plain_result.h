// How the results of a tile over plain rows leave a block: folded into what came before, stored as
// partial results of a chunk, or divided and rounded into the rows of the output.
//
// A thread has 8 or 16 of the dims of row lane / 2. What it has summed so far lies in shared
// memory, in places of its own: the products need its registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/plain_item.h"
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

  EFFINFER_DEVICE PlainResult(Unit& unit, const ops::AttentionProblem& p, const PlainItem& own,
                              Totals& totals)
      : unit_(unit), p_(p), own_(own), totals_(totals) {
    EFFINFER_UNROLL
    for (int d = 0; d < kOwn; d += 4) totals_[d / 4][unit.thread] = {};
  }

  EFFINFER_DEVICE int row() const { return unit_.lane / 2; }
  EFFINFER_DEVICE int dim() const { return (unit_.warp * 2 + unit_.lane % 2) * kOwn; }

  // What a chunk adds.
  EFFINFER_DEVICE void add(int32_t chunk, float max, float sum, const float (&values)[kOwn]) {
    if (own_.item.partial < 0) return fold(max, sum, values);
    if (row() < own_.num_rows()) store_partial(own_.partial(chunk, row()), max, sum, values);
  }

  // All partial results of the tile, from left to right.
  EFFINFER_DEVICE void add_partials(const ops::AttentionMerge& merge) {
    for (int i = 0; i < merge.num_partials; ++i) {
      const int64_t index = merge.first_partial + int64_t{i} * own_.num_rows() + row();
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

  EFFINFER_DEVICE void store() {
    if (row() >= own_.num_rows()) return;
    const int64_t token = own_.token(row());
    const int head = own_.head(row());
    const PlainEnd end = plain_end(p_, head, max_, sum_);
    const float factor = end.factor;
    if (p_.lse != nullptr && dim() == 0) p_.lse[token * p_.num_qo_heads + head] = end.lse;
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
    const PlainFold joined(max_, sum_, max, sum);
    EFFINFER_UNROLL
    for (int d = 0; d < kOwn; d += 4) {
      Quad& quad = totals_[d / 4][unit_.thread];
      EFFINFER_UNROLL
      for (int e = 0; e < 4; ++e) {
        quad.words[e] = bits_of(joined.add(float_of(quad.words[e]), values[d + e]));
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
  const PlainItem own_;
  Totals& totals_;
  // Of the chunks so far: of the thread's own row.
  float max_ = kPlainNoScore;
  float sum_ = 0.0f;
};

}  // namespace effinfer::cuda
