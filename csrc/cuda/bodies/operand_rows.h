// Rows of matmul operands on a GPU (ops/operand.h): bfloat16 or float32, padded with zeros.
#pragma once

#include "cuda/bodies/row_chunks.h"
#include "ops/operand.h"

namespace effinfer::cuda {

// Rows start at multiples of 64 bytes and have whole chunks, so all stores are vectored.
struct OperandRows {
  uint8_t* data = nullptr;  // null: none
  int64_t row_bytes = 0;
  int cols = 0;
  int padded = 0;
  bool is_bf16 = false;

  // Of the host.
  static OperandRows of(const ops::Operand& out) {
    return {static_cast<uint8_t*>(out.data), out.row_bytes(), static_cast<int>(out.cols),
            static_cast<int>(ops::padded_cols(out.cols)), out.arithmetic == ops::Arithmetic::bf16};
  }

  EFFINFER_DEVICE uint8_t* record(int64_t row) const { return data + row * row_bytes; }

  // Values `first`.. of row `row`, of which those behind the last column become zeros whatever they
  // are: padding meets real weights' zeros, and a NaN would spread.
  template <int kCount, class Unit>
  EFFINFER_DEVICE void store(Unit& unit, int64_t row, int first, float (&values)[kCount]) const {
    store(unit, record(row), first, values);
  }
  // Of the row whose record this is; kWhole: all or none of them are behind the last column.
  template <bool kWhole = false, int kCount, class Unit>
  EFFINFER_DEVICE void store(Unit& unit, uint8_t* record, int first,
                             float (&values)[kCount]) const {
    static_assert(kCount == 4 || kCount == 8);
    EFFINFER_UNROLL
    for (int e = 0; e < kCount; ++e) {
      values[e] = first + (kWhole ? 0 : e) < cols ? values[e] : 0.0f;
    }
    if (!is_bf16) {
      EFFINFER_UNROLL
      for (int i = 0; i < kCount; i += 4) {
        *reinterpret_cast<Quad*>(record + (first + i) * 4) = {
            {bits_of(values[i]), bits_of(values[i + 1]), bits_of(values[i + 2]),
             bits_of(values[i + 3])}};
      }
    } else if constexpr (kCount == 8) {
      *reinterpret_cast<Quad*>(record + first * 2) = encode<Bf16>(unit, values);
    } else {
      *reinterpret_cast<Pair*>(record + first * 2) = {
          {unit.bf16x2(values[0], values[1]), unit.bf16x2(values[2], values[3])}};
    }
  }
};

// Of the host: what multiplies on a GPU.
inline bool multiplies_on_gpu(ops::Arithmetic arithmetic) {
  return arithmetic == ops::Arithmetic::bf16 || arithmetic == ops::Arithmetic::f32;
}
inline constexpr const char* kArithmetics = "a GPU multiplies in bf16 or f32";

struct ToOperandParams {
  const float* x = nullptr;
  int64_t x_stride = 0;
  OperandRows out;
  int parts = 1;  // blocks of a row
  bool vectored = false;
};

// A thread eight numbers: 32 bytes in, 16 or 32 out.
struct ToOperandKernel {
  static constexpr const char* kName = "to_operand";
  static constexpr int kThreads = 256;
  static constexpr int kNumbers = 8;
  using Params = ToOperandParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int row = unit.block / p.parts;
    const int first = (unit.block % p.parts * kThreads + unit.thread) * kNumbers;
    if (first >= p.out.padded) return;
    float values[kNumbers];
    load_floats(unit, p.x + row * p.x_stride, first, p.out.cols, p.vectored, values);
    p.out.store(unit, row, first, values);
  }
};

}  // namespace effinfer::cuda
