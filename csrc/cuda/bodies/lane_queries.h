// Queries as they lie in the registers of products (bodies/fragments.h), made by the lanes that
// will load them.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float16.h"
#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/fragments.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// Where a lane's two rows of queries lie.
class LaneQueries {
 public:
  EFFINFER_DEVICE LaneQueries(const ops::AttentionProblem& p, const ops::AttentionTile& tile,
                              const uint8_t* queries, int first_row)
      : dtype_(p.q.dtype) {
    const int64_t bytes = dtype_ == DType::f32 ? 4 : 2;
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      has_[r] = row < tile.num_rows * tile.num_heads;
      const int token = has_[r] ? row / tile.num_heads : 0;
      const int head = has_[r] ? row % tile.num_heads : 0;
      rows_[r] = queries + ((tile.first_row + token) * p.q.row_stride +
                            (tile.first_head + head) * p.q.head_stride) *
                               bytes;
    }
  }

  // 0 of a row that is not there.
  template <class Unit>
  EFFINFER_DEVICE float at(Unit& unit, int r, int dim) const {
    if (!has_[r]) return 0.0f;
    if (dtype_ == DType::f32) return unit.load(reinterpret_cast<const float*>(rows_[r]) + dim);
    const uint16_t bits = unit.load(reinterpret_cast<const uint16_t*>(rows_[r]) + dim);
    return dtype_ == DType::bf16 ? bf16_to_f32(bits) : unit.from_f16(bits);
  }

 private:
  DType dtype_;
  const uint8_t* rows_[2];
  bool has_[2];
};

// `queries` of 16 rows from `first_row` on as A operands, those of every `stride`th step of 16 dims
// from `first_step` on: each lane stores what it, or the same lane of another warp, will load. Rows
// are scaled by a power of two to numbers below 2 where float16 needs it, by one warp their
// TileRows with them (`rows` is null for the others).
template <DType kType, class Unit>
EFFINFER_DEVICE void set_lane_queries(Unit& unit, const ops::AttentionProblem& p,
                                      const ops::AttentionTile& tile, const uint8_t* queries,
                                      int first_row, TileRow* rows, int first_step, int stride,
                                      Quad (*to)[kWarp]) {
  using Multiply = Products<kType, 1>;
  const int row = unit.lane / 4;
  const int q = unit.lane % 4;
  const LaneQueries from(p, tile, queries, first_row + row);
  float factor[2] = {query_sign(p), query_sign(p)};
  if constexpr (Multiply::kScalesQueries) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      float max = 0.0f;
      for (int dim = q; dim < p.k.dims; dim += 4) {
        max = fmaxf(max, fabsf(from.at(unit, r, dim)));
      }
      max = fmaxf(max, unit.shfl_xor(max, 1));
      max = fmaxf(max, unit.shfl_xor(max, 2));
      const float power = float_of(bits_of(max) & 0x7f800000);
      if (power <= 0.0f) continue;
      factor[r] *= 1.0f / power;
      if (q == 0 && rows != nullptr) rows[row + 8 * r].scale = row_scale(p) * power;
    }
  }
  for (int step = first_step; step < p.k.dims / 16; step += stride) {
    Quad quad;
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2;
      const int dim = 16 * step + (KvBlock<kType>::P == 4 ? 4 * q + 2 * half : 2 * q + 8 * half);
      const float low = from.at(unit, i % 2, dim) * factor[i % 2];
      const float high = from.at(unit, i % 2, dim + 1) * factor[i % 2];
      quad.words[i] = Multiply::rounded(unit, low, high);
    }
    to[step][unit.lane] = quad;
  }
}

}  // namespace effinfer::cuda
