// How results leave a tile, eight dims of a row at a time: as partial results of a chunk, or
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
  int32_t value_places;  // of pages that come whole (bodies/attention_pages.h)
};

// A lane's values of 32 dims: rows lane / 4 and lane / 4 + 8, dims 8 (lane % 4) on.
using LaneValues = float[4][4];
EFFINFER_DEVICE float& value_at(LaneValues& values, int d, int r) {
  return values[d % 4][2 * r + d / 4];
}
// Those of one row, whichever: so that code for both is there once.
EFFINFER_DEVICE void row_values(const LaneValues& values, int r, float (&of)[8]) {
  EFFINFER_UNROLL
  for (int d = 0; d < 8; ++d) of[d] = r == 0 ? values[d % 4][d / 4] : values[d % 4][2 + d / 4];
}
// Each row takes the other one's place.
EFFINFER_DEVICE void swap_rows(RowState (&rows)[2], LaneValues& values) {
  const RowState row = rows[0];
  rows[0] = rows[1];
  rows[1] = row;
  EFFINFER_UNROLL
  for (int d = 0; d < 8; ++d) {
    const float value = value_at(values, d, 0);
    value_at(values, d, 0) = value_at(values, d, 1);
    value_at(values, d, 1) = value;
  }
}
// The first of the columns that are not taken yet. Registers have no index: the others move up, and
// the code behind it is there once.
template <int kCount>
EFFINFER_DEVICE void take_first(LaneValues (&from)[kCount], LaneValues& values) {
  EFFINFER_UNROLL
  for (int i = 0; i < 16; ++i) {
    values[i / 4][i % 4] = from[0][i / 4][i % 4];
    EFFINFER_UNROLL
    for (int column = 0; column + 1 < kCount; ++column) {
      from[column][i / 4][i % 4] = from[column + 1][i / 4][i % 4];
    }
  }
}
EFFINFER_DEVICE void clear(LaneValues& values) {
  EFFINFER_UNROLL
  for (int i = 0; i < 4; ++i) {
    EFFINFER_UNROLL
    for (int r = 0; r < 4; ++r) values[i][r] = 0.0f;
  }
}

EFFINFER_DEVICE void fold_values(LaneValues& values, LaneValues& chunk,
                                 const Factors (&factors)[2]) {
  EFFINFER_UNROLL
  for (int r = 0; r < 2; ++r) {
    EFFINFER_UNROLL
    for (int d = 0; d < 8; ++d) {
      float& value = value_at(values, d, r);
      value = fold_value(value, value_at(chunk, d, r), factors[r]);
    }
  }
}

// Eight numbers next to each other, rounded to the dtype. What they are stored to is aligned to 16
// bytes: rows of results are, and heads are of multiples of eight dims.
template <class Unit>
EFFINFER_DEVICE void store_eight(Unit& unit, DType dtype, uint8_t* to, const float (&x)[8]) {
  auto* quads = reinterpret_cast<Quad*>(to);
  if (dtype == DType::f32) {
    quads[0] = {bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])};
    quads[1] = {bits_of(x[4]), bits_of(x[5]), bits_of(x[6]), bits_of(x[7])};
    return;
  }
  Quad quad;
  EFFINFER_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float low = x[2 * i];
    const float high = x[2 * i + 1];
    quad.words[i] = dtype == DType::bf16 ? unit.bf16x2(low, high) : unit.f16x2(low, high);
  }
  quads[0] = quad;
}

// Rows are counted within the tile.
class AttentionOutput {
 public:
  EFFINFER_DEVICE AttentionOutput(const AttentionParams& params, const ops::AttentionTile& tile)
      : params_(params), p_(params.p), tile_(tile) {}

  EFFINFER_DEVICE int num_rows() const { return tile_.num_rows * tile_.num_heads; }

  // Number `index`: a row's values from `dim` on; its state once.
  EFFINFER_DEVICE static void store_partial_values(const ops::AttentionProblem& p, int64_t index,
                                                   int dim, const float (&values)[8]) {
    auto* to = reinterpret_cast<Quad*>(p.partial_out + index * p.v.dims + dim);
    EFFINFER_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float* of = values + 4 * half;
      to[half] = {bits_of(of[0]), bits_of(of[1]), bits_of(of[2]), bits_of(of[3])};
    }
  }
  EFFINFER_DEVICE static void store_partial_state(const ops::AttentionProblem& p, int64_t index,
                                                  const RowState& row) {
    p.partial_ms[2 * index] = row.max;
    p.partial_ms[2 * index + 1] = row.sum;
  }
  EFFINFER_DEVICE static RowState load_partial_state(const ops::AttentionProblem& p,
                                                     int64_t index) {
    return {p.partial_ms[2 * index], p.partial_ms[2 * index + 1]};
  }
  // As other blocks may have written them while this one ran.
  template <class Unit>
  EFFINFER_DEVICE static void load_partial_values(Unit& unit, const ops::AttentionProblem& p,
                                                  int64_t index, int dim, float (&values)[8]) {
    const auto* from = reinterpret_cast<const Quad*>(p.partial_out + index * p.v.dims + dim);
    EFFINFER_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Quad quad = unit.load_written(from + half);
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) values[4 * half + i] = float_of(quad.words[i]);
    }
  }

  struct Row {
    int token;
    int head;
  };
  EFFINFER_DEVICE Row row_at(int index) const { return {token_of(index), head_of(index)}; }

  // What a row's values are multiplied by at its end. A row that sees no key is zeros, and the
  // logarithm of its sum, which one of its lanes stores, minus infinity.
  template <class Unit>
  EFFINFER_DEVICE float end_row(Unit& unit, int index, const RowState& row, bool stores_lse) const {
    return end_row(unit, row_at(index), row, stores_lse);
  }
  template <class Unit>
  EFFINFER_DEVICE float end_row(Unit& unit, const Row& at, RowState row, bool stores_lse) const {
    float scale = p_.v_scale;
    if (p_.sink_logits != nullptr) {
      const float sink = rounded_product(p_.sink_logits[at.head], kLog2e);
      const float highest = fmaxf(sink, row.max);
      const float kept = unit.exp2(row.max - highest);
      row.sum = rounded_product(row.sum, kept) + unit.exp2(sink - highest);
      row.max = highest;
      scale *= kept;
    }
    if (p_.lse != nullptr && stores_lse) {
      constexpr float kLn2 = 0.693147181f;
      const int64_t place = int64_t{at.token} * p_.num_qo_heads + at.head;
      p_.lse[place] =
          row.sum == 0.0f ? -INFINITY : fmaf(row.max, kLn2, logf(row.sum)) * p_.lse_factor;
    }
    return row.sum == 0.0f ? 0.0f : scale / row.sum;
  }

  // A row's values from `dim` on. What pads the rows of an operand is written by the lanes of its
  // last head, each of which has every `pad_step`-th dim.
  template <class Unit>
  EFFINFER_DEVICE void store_values(Unit& unit, int index, int dim, float factor,
                                    const float (&values)[8], int pad_step) const {
    float out[8];
    EFFINFER_UNROLL
    for (int d = 0; d < 8; ++d) out[d] = rounded_product(values[d], factor);
    const int token = token_of(index);
    const int head = head_of(index);
    const int64_t col = int64_t{head} * p_.v.dims + dim;
    if (p_.out_operand.data == nullptr) {
      const int64_t bytes = p_.q.dtype == DType::f32 ? 4 : 2;
      return cuda::store_eight(unit, p_.q.dtype, p_.out + (token * p_.out_stride + col) * bytes,
                               out);
    }
    const bool wide = p_.out_operand.arithmetic == ops::Arithmetic::f32;
    const DType dtype = wide ? DType::f32 : DType::bf16;
    auto* row = static_cast<uint8_t*>(p_.out_operand.data) + token * params_.operand_row_bytes;
    cuda::store_eight(unit, dtype, row + col * (wide ? 4 : 2), out);
    if (head == p_.num_qo_heads - 1) store_pads(unit, dtype, row, dim, pad_step);
  }

  // The same of a row that is looked up once for all its dims, for which not all kernels have the
  // registers.
  struct Place {
    uint8_t* values;   // from dim 0 on
    uint8_t* operand;  // the row that ends with them; or null
  };
  EFFINFER_DEVICE Place place_of(const Row& at) const {
    const int64_t col = int64_t{at.head} * p_.v.dims;
    if (p_.out_operand.data == nullptr) {
      const int64_t bytes = p_.q.dtype == DType::f32 ? 4 : 2;
      return {p_.out + (at.token * p_.out_stride + col) * bytes, nullptr};
    }
    const int64_t bytes = p_.out_operand.arithmetic == ops::Arithmetic::f32 ? 4 : 2;
    auto* row = static_cast<uint8_t*>(p_.out_operand.data) + at.token * params_.operand_row_bytes;
    return {row + col * bytes, at.head == p_.num_qo_heads - 1 ? row : nullptr};
  }
  template <class Unit>
  EFFINFER_DEVICE void store_values(Unit& unit, const Place& place, int dim, float factor,
                                    const float (&values)[8], int pad_step) const {
    store_eight(unit, place, dim, factor, values);
    if (place.operand != nullptr) store_pads(unit, place, dim, pad_step);
  }
  // The two parts of it.
  template <class Unit>
  EFFINFER_DEVICE void store_eight(Unit& unit, const Place& place, int dim, float factor,
                                   const float (&values)[8]) const {
    float out[8];
    EFFINFER_UNROLL
    for (int d = 0; d < 8; ++d) out[d] = rounded_product(values[d], factor);
    const DType dtype = out_dtype();
    cuda::store_eight(unit, dtype, place.values + dim * (dtype == DType::f32 ? 4 : 2), out);
  }
  template <class Unit>
  EFFINFER_DEVICE void store_pads(Unit& unit, const Place& place, int dim, int pad_step) const {
    store_pads(unit, out_dtype(), place.operand, dim, pad_step);
  }

 private:
  EFFINFER_DEVICE DType out_dtype() const {
    if (p_.out_operand.data == nullptr) return p_.q.dtype;
    return p_.out_operand.arithmetic == ops::Arithmetic::f32 ? DType::f32 : DType::bf16;
  }
  template <class Unit>
  EFFINFER_DEVICE void store_pads(Unit& unit, DType dtype, uint8_t* row, int dim,
                                  int pad_step) const {
    const float zeros[8] = {};
    const int64_t cols = int64_t{p_.num_qo_heads} * p_.v.dims;
    EFFINFER_NO_UNROLL
    for (int64_t pad = cols + dim; pad < params_.operand_cols; pad += pad_step) {
      cuda::store_eight(unit, dtype, row + pad * (dtype == DType::f32 ? 4 : 2), zeros);
    }
  }
  EFFINFER_DEVICE int token_of(int index) const {
    return tile_.first_row + index / tile_.num_heads;
  }
  EFFINFER_DEVICE int head_of(int index) const {
    return tile_.first_head + index % tile_.num_heads;
  }

  const AttentionParams& params_;
  const ops::AttentionProblem& p_;
  const ops::AttentionTile& tile_;
};

// Counts a tile's items as they end: true in all threads of the block that ends the last one,
// which then sees what the others have stored. `flag` is shared by the block.
template <class Unit>
EFFINFER_DEVICE bool ends_last_item(Unit& unit, const ops::AttentionProblem& p, int32_t index,
                                    int32_t& flag) {
  unit.fence();
  unit.sync();
  if (unit.thread == 0) {
    const int32_t before = unit.atomic_add(p.done + index, 1);
    flag = before + 1 == p.work.merges[index].num_items ? 1 : 0;
    if (flag != 0) p.done[index] = 0;
    unit.fence();
  }
  unit.sync();
  return flag != 0;
}

}  // namespace effinfer::cuda
