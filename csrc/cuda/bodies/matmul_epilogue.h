// What follows the sums of a matmul: bias, GLU, residual, and the store as floats or as an operand.
#pragma once

#include "cuda/bodies/activation.h"
#include "cuda/bodies/row_chunks.h"
#include "cuda/unit.h"
#include "ops/matmul.h"

namespace effinfer::cuda {

// A weight of a matmul and what is made of its outputs.
struct MatmulWeight {
  const uint8_t* data = nullptr;
  int64_t group_bytes = 0;
  int32_t rows = 0;
  int32_t groups = 0;
  const float* bias = nullptr;
  const float* residual = nullptr;
  float* out = nullptr;
  int64_t out_stride = 0;
};

// Where results go when they are an operand; data is null when they are floats.
struct OperandOut {
  uint8_t* data = nullptr;
  int64_t row_bytes = 0;
  int32_t padded = 0;
  bool is_bf16 = false;
};

inline MatmulWeight matmul_weight(const ops::MatmulPart& part) {
  const ops::PackedWeight& weight = part.weight;
  return {weight.data,
          weight.group_bytes,
          static_cast<int32_t>(weight.rows),
          static_cast<int32_t>(weight.groups()),
          part.bias,
          part.residual,
          part.out,
          part.out_stride};
}

inline OperandOut operand_out(const ops::Operand& out) {
  if (out.data == nullptr) return {};
  return {static_cast<uint8_t*>(out.data), out.row_bytes(),
          static_cast<int32_t>(ops::padded_cols(out.cols)),
          out.arithmetic == ops::Arithmetic::bf16};
}

template <class Unit>
EFFINFER_DEVICE void store_number(Unit& unit, const OperandOut& out, int64_t token, int col,
                                  float value) {
  uint8_t* record = out.data + token * out.row_bytes;
  if (out.is_bf16) {
    reinterpret_cast<uint16_t*>(record)[col] = static_cast<uint16_t>(unit.bf16x2(value, 0.0f));
  } else {
    reinterpret_cast<float*>(record)[col] = value;
  }
}

// What is added to the sum of a row. A zero is added, too: no other kernel gives -0.
template <class Unit>
EFFINFER_DEVICE float bias_of(Unit& unit, const MatmulWeight& weight, int row) {
  return weight.bias == nullptr ? 0.0f : unit.load(weight.bias + row);
}

// Adds the residual and stores output `row` of a token.
template <class Unit>
EFFINFER_DEVICE void store_output(Unit& unit, const MatmulWeight& weight, const OperandOut& operand,
                                  int64_t token, int row, float value) {
  const int64_t at = token * weight.out_stride + row;
  // Not unit.load(): it may be what is written here.
  if (weight.residual != nullptr) value += weight.residual[at];
  if (operand.data == nullptr) {
    weight.out[at] = value;
  } else {
    store_number(unit, operand, token, row, value);
  }
}

// Output `row` of a token from its sum, and with GLU that of the second weight.
template <class Unit>
EFFINFER_DEVICE void finish_output(Unit& unit, const MatmulWeight& weight,
                                   const MatmulWeight& second, ops::UnaryOp glu,
                                   const OperandOut& operand, int64_t token, int row, float sum,
                                   float second_sum) {
  float value = sum + bias_of(unit, weight, row);
  if (glu != ops::UnaryOp::none) {
    value = apply(glu, value, 0.0f) * (second_sum + bias_of(unit, second, row));
  }
  store_output(unit, weight, operand, token, row, value);
}

// Whether four outputs of a token from a multiple of four on are 16 aligned bytes. Of the host.
inline bool has_fours(const ops::MatmulPart& part) {
  const auto address = reinterpret_cast<uintptr_t>(part.out);
  const auto residual = reinterpret_cast<uintptr_t>(part.residual);
  return part.out_stride % 4 == 0 && address % 16 == 0 && residual % 16 == 0;
}

// What outputs row .. row + 3 of each token have in common. Of rows behind the last there are
// zeros.
struct FourRows {
  int first;
  int count;
  float bias[4];
  float second_bias[4];
};

// `row` is a multiple of four.
template <class Unit>
EFFINFER_DEVICE FourRows four_rows(Unit& unit, const MatmulWeight& weight,
                                   const MatmulWeight& second, ops::UnaryOp glu, int row) {
  FourRows rows = {row, weight.rows - row < 4 ? weight.rows - row : 4, {}, {}};
  EFFINFER_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (i < rows.count) rows.bias[i] = bias_of(unit, weight, row + i);
    if (i < rows.count && glu != ops::UnaryOp::none) {
      rows.second_bias[i] = bias_of(unit, second, row + i);
    }
  }
  return rows;
}

EFFINFER_DEVICE void activate_four(const FourRows& rows, ops::UnaryOp glu, const Quad& sums,
                                   const Quad& seconds, float (&values)[4]) {
  EFFINFER_UNROLL
  for (int i = 0; i < 4; ++i) values[i] = float_of(sums.words[i]) + rows.bias[i];
  if (glu == ops::UnaryOp::none) return;
  apply_each(glu, values, 0.0f);
  EFFINFER_UNROLL
  for (int i = 0; i < 4; ++i) values[i] *= float_of(seconds.words[i]) + rows.second_bias[i];
}

// Where four outputs of each token are, where all four are there and has_fours() is true: floats,
// or bfloat16, each with a pointer of its own that is never null: of what may be null the compiler
// does not see that it is global memory.
struct FourPlaces {
  bool is_bf16;
  float* floats;
  uint8_t* narrow;
  int64_t bytes;  // from token to token
  const float* residual;
  int64_t residual_stride;
};

EFFINFER_DEVICE FourPlaces four_places(const MatmulWeight& weight, const OperandOut& operand,
                                       int row) {
  const bool is_operand = operand.data != nullptr;
  uint8_t* const data = is_operand ? operand.data : reinterpret_cast<uint8_t*>(weight.out);
  return {is_operand && operand.is_bf16,
          reinterpret_cast<float*>(data) + row,
          data + row * 2,
          is_operand ? operand.row_bytes : weight.out_stride * 4,
          weight.residual == nullptr ? nullptr : weight.residual + row,
          weight.out_stride};
}

// Zeros where there are none, which are not to be added.
EFFINFER_DEVICE Quad load_residuals(const FourPlaces& places, int64_t token) {
  if (places.residual == nullptr) return {};
  return *reinterpret_cast<const Quad*>(places.residual + token * places.residual_stride);
}
template <class Unit>
EFFINFER_DEVICE void store_four(Unit& unit, const FourPlaces& places, int64_t token,
                                float (&values)[4], const Quad& residuals) {
  if (places.residual != nullptr) {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) values[i] += float_of(residuals.words[i]);
  }
  if (places.is_bf16) {
    *reinterpret_cast<Pair*>(places.narrow + token * places.bytes) = {
        {unit.bf16x2(values[0], values[1]), unit.bf16x2(values[2], values[3])}};
    return;
  }
  *reinterpret_cast<Quad*>(places.floats + token * (places.bytes / 4)) = {
      {bits_of(values[0]), bits_of(values[1]), bits_of(values[2]), bits_of(values[3])}};
}

// Outputs of four rows, of which those behind the last are left out: the bits of finish_output().
// `fours` is what has_fours() says.
template <class Unit>
EFFINFER_DEVICE void finish_four(Unit& unit, const MatmulWeight& weight, const FourRows& rows,
                                 ops::UnaryOp glu, const OperandOut& operand, bool fours,
                                 int64_t token, const Quad& sums, const Quad& seconds) {
  float values[4];
  activate_four(rows, glu, sums, seconds, values);
  if (fours && rows.count == 4) {
    const FourPlaces places = four_places(weight, operand, rows.first);
    store_four(unit, places, token, values, load_residuals(places, token));
    return;
  }
  EFFINFER_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (i < rows.count) store_output(unit, weight, operand, token, rows.first + i, values[i]);
  }
}

// Zeros from the last output of the operand's rows to their padded end: of tokens [first, last), by
// `count` threads of which this is `index`.
template <class Unit>
EFFINFER_DEVICE void pad_operand(Unit& unit, const OperandOut& out, int rows, int64_t first,
                                 int64_t last, int index, int count) {
  const int padding = out.padded - rows;
  if (out.data == nullptr || padding == 0) return;
  constexpr int kMost = static_cast<int>(ops::kOperandPad);
  EFFINFER_NO_UNROLL
  for (int64_t i = index; i < (last - first) * kMost; i += count) {
    const int col = static_cast<int>(i % kMost);
    if (col < padding) store_number(unit, out, first + i / kMost, rows + col, 0.0f);
  }
}

}  // namespace effinfer::cuda
