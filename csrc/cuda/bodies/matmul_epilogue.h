// What follows the sums of a matmul: bias, GLU, residual, and the store as floats or as an operand.
#pragma once

#include "cuda/bodies/activation.h"
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

// Output `row` of a token from its sum, and with GLU that of the second weight.
template <class Unit>
EFFINFER_DEVICE void finish_output(Unit& unit, const MatmulWeight& weight,
                                   const MatmulWeight& second, ops::UnaryOp glu,
                                   const OperandOut& operand, int64_t token, int row, float sum,
                                   float second_sum) {
  // A zero is added too: no other kernel gives -0.
  float value = sum + (weight.bias == nullptr ? 0.0f : unit.load(weight.bias + row));
  if (glu != ops::UnaryOp::none) {
    const float linear =
        second_sum + (second.bias == nullptr ? 0.0f : unit.load(second.bias + row));
    value = apply(glu, value, 0.0f) * linear;
  }
  const int64_t at = token * weight.out_stride + row;
  // Not unit.load(): it may be what is written here.
  if (weight.residual != nullptr) value += weight.residual[at];
  if (operand.data == nullptr) {
    weight.out[at] = value;
  } else {
    store_number(unit, operand, token, row, value);
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
  for (int64_t i = index; i < (last - first) * kMost; i += count) {
    const int col = static_cast<int>(i % kMost);
    if (col < padding) store_number(unit, out, first + i / kMost, rows + col, 0.0f);
  }
}

}  // namespace effinfer::cuda
