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
  // Two neighbours, as they lie in memory: as float32 both words, else the first one.
  struct Pair {
    uint32_t words[2];
  };

  EFFINFER_DEVICE LaneQueries(const ops::AttentionProblem& p, const ops::AttentionTile& tile,
                              const uint8_t* queries, int first_row)
      : dtype_(p.q.dtype), bytes_(dtype_ == DType::f32 ? 4 : 2) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      has_[r] = row < tile.num_rows * tile.num_heads;
      const int there = has_[r] ? row : 0;
      const int token = there / tile.num_heads;
      const int head = there - token * tile.num_heads;
      rows_[r] = queries + ((tile.first_row + token) * p.q.row_stride +
                            (tile.first_head + head) * p.q.head_stride) *
                               bytes_;
    }
  }

  // Dims `dim`, which is even, and the next. No branch is between loads, so that all are under way
  // at once: of a row that is not there they are another one's.
  template <class Unit>
  EFFINFER_DEVICE Pair load(Unit& unit, int r, int dim) const {
    const auto* const words = reinterpret_cast<const uint32_t*>(rows_[r] + dim * bytes_);
    return {{unit.load(words), unit.load(words + bytes_ / 4)}};
  }
  // 0 of a row that is not there.
  template <class Unit>
  EFFINFER_DEVICE float low(Unit& unit, int r, const Pair& pair) const {
    const uint32_t word = pair.words[0];
    return value(unit, r, word, word << 16, static_cast<uint16_t>(word));
  }
  template <class Unit>
  EFFINFER_DEVICE float high(Unit& unit, int r, const Pair& pair) const {
    const uint32_t word = pair.words[0];
    return value(unit, r, pair.words[1], word & 0xffff0000, static_cast<uint16_t>(word >> 16));
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE float value(Unit& unit, int r, uint32_t f32, uint32_t bf16, uint16_t f16) const {
    const float wide = float_of(dtype_ == DType::f32 ? f32 : bf16);
    const float x = dtype_ == DType::f16 ? unit.from_f16(f16) : wide;
    return has_[r] ? x : 0.0f;
  }

  const DType dtype_;
  const int bytes_;
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
  using Pair = LaneQueries::Pair;
  constexpr int kTogether = 2;  // steps
  const int row = unit.lane / 4;
  const int q = unit.lane % 4;
  const int steps = p.k.dims / 16;
  const LaneQueries from(p, tile, queries, first_row + row);
  float factor[2] = {query_sign(p), query_sign(p)};
  if constexpr (Multiply::kScalesQueries) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      float max = 0.0f;
      EFFINFER_UNROLL_BY(4)
      for (int dim = 2 * q; dim < p.k.dims; dim += 8) {
        const Pair pair = from.load(unit, r, dim);
        max = fmaxf(max, fmaxf(fabsf(from.low(unit, r, pair)), fabsf(from.high(unit, r, pair))));
      }
      max = fmaxf(max, unit.shfl_xor(max, 1));
      max = fmaxf(max, unit.shfl_xor(max, 2));
      const float power = float_of(bits_of(max) & 0x7f800000);
      if (power <= 0.0f) continue;
      factor[r] *= 1.0f / power;
      if (q == 0 && rows != nullptr) rows[row + 8 * r].scale = row_scale(p) * power;
    }
  }
  for (int step = first_step; step < steps; step += kTogether * stride) {
    Pair pairs[kTogether][4];
    EFFINFER_UNROLL
    for (int s = 0; s < kTogether; ++s) {
      const int of = step + s * stride < steps ? step + s * stride : step;
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2;
        const int dim = 16 * of + (KvBlock<kType>::P == 4 ? 4 * q + 2 * half : 2 * q + 8 * half);
        pairs[s][i] = from.load(unit, i % 2, dim);
      }
    }
    EFFINFER_UNROLL
    for (int s = 0; s < kTogether; ++s) {
      Quad quad;
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float low = from.low(unit, i % 2, pairs[s][i]) * factor[i % 2];
        const float high = from.high(unit, i % 2, pairs[s][i]) * factor[i % 2];
        quad.words[i] = Multiply::rounded(unit, low, high);
      }
      if (step + s * stride < steps) to[step + s * stride][unit.lane] = quad;
    }
  }
}

}  // namespace effinfer::cuda
