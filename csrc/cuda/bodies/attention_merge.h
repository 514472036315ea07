// How the results of a tile leave: as partial results of a chunk, folded into what came before, or
// divided and rounded into the rows of the output or of an operand.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float16.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

struct AttentionParams {
  ops::AttentionProblem p;
  int64_t operand_row_bytes;
  int32_t operand_cols;  // with padding
};

// A lane's values: rows lane / 4 and lane / 4 + 8, dims 32 warp + 8 (lane % 4) on.
using LaneValues = float[4][4];
EFFINFER_DEVICE float& value_at(LaneValues& values, int d, int r) {
  return values[d % 4][2 * r + d / 4];
}

// Eight numbers next to each other, rounded to the dtype.
template <class Unit>
EFFINFER_DEVICE void store_eight(Unit& unit, DType dtype, uint8_t* to, const float (&x)[8]) {
  if (dtype == DType::f32) {
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) reinterpret_cast<float*>(to)[i] = x[i];
    return;
  }
  EFFINFER_UNROLL
  for (int i = 0; i < 8; i += 2) {
    const uint32_t pair =
        dtype == DType::bf16 ? unit.bf16x2(x[i], x[i + 1]) : unit.f16x2(x[i], x[i + 1]);
    auto* halves = reinterpret_cast<uint16_t*>(to) + i;
    halves[0] = static_cast<uint16_t>(pair);
    halves[1] = static_cast<uint16_t>(pair >> 16);
  }
}

// Of 32 partial results of each row: what is multiplied, and the row with it.
struct MergeFactors {
  Factors factors[kWarp][kTileRows];
  RowState rows[kWarp][kTileRows];  // the maximum so far, the chunk's own sum
};

template <int kWarps>
class AttentionResult {
 public:
  EFFINFER_DEVICE AttentionResult(const AttentionParams& params, const ops::AttentionTile& tile)
      : params_(params), p_(params.p), tile_(tile) {}

  EFFINFER_DEVICE int num_rows() const { return tile_.num_rows * tile_.num_heads; }

  template <class Unit>
  EFFINFER_DEVICE static void fold(Unit&, RowState (&rows)[2], LaneValues& values,
                                   const RowState (&chunk_rows)[2], LaneValues& chunk_values) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const Factors factors = fold_row(rows[r], chunk_rows[r]);
      EFFINFER_UNROLL
      for (int d = 0; d < 8; ++d) {
        float& value = value_at(values, d, r);
        value = fold_value(value, value_at(chunk_values, d, r), factors);
      }
    }
  }

  // Of the chunk whose first row's partial result is number `first`.
  template <class Unit>
  EFFINFER_DEVICE void store_partial(Unit& unit, int64_t first, const RowState (&rows)[2],
                                     LaneValues& values) const {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!has(unit, r)) continue;
      const int64_t index = first + row_of(unit, r);
      if (dim_of(unit) < p_.v.dims) {
        auto* to = reinterpret_cast<Quad*>(p_.partial_out + index * p_.v.dims + dim_of(unit));
        EFFINFER_UNROLL
        for (int half = 0; half < 2; ++half) {
          EFFINFER_UNROLL
          for (int i = 0; i < 4; ++i) {
            to[half].words[i] = bits_of(value_at(values, 4 * half + i, r));
          }
        }
      }
      if (unit.thread % 4 == 0 && unit.warp == 0) {
        p_.partial_ms[2 * index] = rows[r].max;
        p_.partial_ms[2 * index + 1] = rows[r].sum;
      }
    }
  }

  // All partial results of the tile, from left to right, by whole blocks. What they are multiplied
  // by depends on the rows' maxima alone, so a warp's lanes make the factors of 32 of them at once.
  // Other blocks wrote them while this one ran, so they are read as any memory.
  template <class Unit>
  EFFINFER_DEVICE void merge(Unit& unit, const ops::AttentionMerge& merge,
                             MergeFactors& shared) const {
    RowState rows[2];
    LaneValues values = {};
    float highest[kTileRows / kWarps];  // of the warp's rows, so far
    EFFINFER_UNROLL
    for (float& max : highest) max = kNoScore;
    for (int first = 0; first < merge.num_partials; first += kWarp) {
      const int left = merge.num_partials - first;
      const int64_t index = merge.first_partial + int64_t{first} * num_rows();
      EFFINFER_UNROLL
      for (int i = 0; i < kTileRows / kWarps; ++i) {
        set_factors(unit, index, left, unit.warp * (kTileRows / kWarps) + i, highest[i], shared);
      }
      unit.sync();
      fold_partials(unit, index, left < kWarp ? left : kWarp, shared, rows, values);
      unit.sync();
    }
    store(unit, rows, values);
  }

  // A row that sees no key is zeros, and the logarithm of its sum minus infinity.
  template <class Unit>
  EFFINFER_DEVICE void store(Unit& unit, const RowState (&rows)[2], LaneValues& values) const {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!has(unit, r)) continue;
      const int token = tile_.first_row + row_of(unit, r) / tile_.num_heads;
      const int head = tile_.first_head + row_of(unit, r) % tile_.num_heads;
      float scale = p_.v_scale;
      RowState row = rows[r];
      if (p_.sink_logits != nullptr) {
        const float sink = p_.sink_logits[head];
        const float highest = fmaxf(sink, row.max);
        const float kept = weight_of(row.max, highest);
        row.sum = rounded_product(row.sum, kept) + weight_of(sink, highest);
        row.max = highest;
        scale *= kept;
      }
      if (p_.lse != nullptr && unit.warp == 0 && unit.lane % 4 == 0) {
        const int64_t place = int64_t{token} * p_.num_qo_heads + head;
        p_.lse[place] = row.sum == 0.0f ? -INFINITY : (row.max + logf(row.sum)) * p_.lse_factor;
      }
      if (dim_of(unit) >= p_.v.dims) continue;
      const float factor = row.sum == 0.0f ? 0.0f : scale / row.sum;
      float out[8];
      EFFINFER_UNROLL
      for (int d = 0; d < 8; ++d) out[d] = rounded_product(value_at(values, d, r), factor);
      store_row(unit, token, head, out);
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static int row_of(Unit& unit, int r) {
    return unit.lane / 4 + 8 * r;
  }
  template <class Unit>
  EFFINFER_DEVICE static int dim_of(Unit& unit) {
    return 32 * unit.warp + unit.lane % 4 * 8;
  }
  template <class Unit>
  EFFINFER_DEVICE bool has(Unit& unit, int r) const {
    return row_of(unit, r) < num_rows();
  }

  // Of 32 partial results of a row, of which `left` are there, behind others of that maximum.
  template <class Unit>
  EFFINFER_DEVICE void set_factors(Unit& unit, int64_t index, int left, int row, float& highest,
                                   MergeFactors& shared) const {
    RowState own;
    if (unit.lane < left && row < num_rows()) {
      const float* ms = p_.partial_ms + 2 * (index + int64_t{unit.lane} * num_rows() + row);
      own = {ms[0], ms[1]};
    }
    float max = fmaxf(own.max, highest);  // up to and with the lane's own
    EFFINFER_UNROLL
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const float lower = unit.shfl(max, (unit.lane - distance) & (kWarp - 1));
      if (unit.lane >= distance) max = fmaxf(max, lower);
    }
    const float lower = unit.shfl(max, (unit.lane - 1) & (kWarp - 1));
    const RowState before = {unit.lane == 0 ? highest : lower, 0.0f};
    shared.factors[unit.lane][row] = factors_of(before, own);
    shared.rows[unit.lane][row] = {max, own.sum};
    highest = unit.shfl(max, kWarp - 1);
  }

  template <class Unit>
  EFFINFER_DEVICE void fold_partials(Unit& unit, int64_t index, int count,
                                     const MergeFactors& shared, RowState (&rows)[2],
                                     LaneValues& values) const {
    constexpr int kAhead = 8;  // partial results that are loaded at once
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!has(unit, r)) continue;
      const int row = row_of(unit, r);
      for (int first = 0; first < count; first += kAhead) {
        float chunk[kAhead][8];
        EFFINFER_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          const int at = first + i < count ? first + i : count - 1;
          load_partial(unit, index + int64_t{at} * num_rows() + row, chunk[i]);
        }
        EFFINFER_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          if (first + i >= count) break;
          const Factors factors = shared.factors[first + i][row];
          const RowState state = shared.rows[first + i][row];
          rows[r].max = state.max;
          rows[r].sum = fold_value(rows[r].sum, state.sum, factors);
          EFFINFER_UNROLL
          for (int d = 0; d < 8; ++d) {
            float& value = value_at(values, d, r);
            value = fold_value(value, chunk[i][d], factors);
          }
        }
      }
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void load_partial(Unit& unit, int64_t index, float (&values)[8]) const {
    const int dim = dim_of(unit) < p_.v.dims ? dim_of(unit) : 0;
    const auto* from = reinterpret_cast<const Quad*>(p_.partial_out + index * p_.v.dims + dim);
    EFFINFER_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Quad quad = from[half];
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) values[4 * half + i] = float_of(quad.words[i]);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void store_row(Unit& unit, int token, int head, const float (&out)[8]) const {
    const int64_t col = int64_t{head} * p_.v.dims + dim_of(unit);
    if (p_.out_operand.data == nullptr) {
      const int64_t bytes = p_.q.dtype == DType::f32 ? 4 : 2;
      return store_eight(unit, p_.q.dtype, p_.out + (token * p_.out_stride + col) * bytes, out);
    }
    const bool wide = p_.out_operand.arithmetic == ops::Arithmetic::f32;
    const DType dtype = wide ? DType::f32 : DType::bf16;
    auto* row = static_cast<uint8_t*>(p_.out_operand.data) + token * params_.operand_row_bytes;
    store_eight(unit, dtype, row + col * (wide ? 4 : 2), out);
    if (head != p_.num_qo_heads - 1) return;
    const float zeros[8] = {};
    const int64_t cols = int64_t{p_.num_qo_heads} * p_.v.dims;
    const int64_t step = (p_.v.dims < 32 * kWarps ? p_.v.dims : 32 * kWarps);
    for (int64_t pad = cols + dim_of(unit); pad < params_.operand_cols; pad += step) {
      store_eight(unit, dtype, row + pad * (wide ? 4 : 2), zeros);
    }
  }

  const AttentionParams& params_;
  const ops::AttentionProblem& p_;
  const ops::AttentionTile& tile_;
};

}  // namespace effinfer::cuda
