// A matmul operand: rows of activations, written once by the producer (norm, attention, GLU, ...)
// in the arithmetic that the matmul will use.
//
//   int8  a record per row (K' = K rounded up to 64):
//           int8 q[K']           value = scale[k / 16] * q[k]
//           float scale[K'/16]   max|x| / 127 of its block; q is rounded to nearest even
//           int32 bias[K'/16]    -128 * sum of q: 128 / zero times what the zero of quants adds
//           float scaled[K'/32]  scale * sum of two blocks, added: what minima of 32 multiply
//         Blocks of 16 and not of 32, which Q8_0 files use: an outlier then coarsens the steps of
//         15 neighbours instead of 31, which nearly halves the divergence of a model's output.
//         The padding is zeros. A block whose maximum is below kSmallestBlock is zeros; a block
//         with an infinity or a NaN has a NaN scale, so that every result of its row is NaN.
//   int8_token  the operand of ternary weights (BitNet b1.58, arXiv:2402.17764, section 2), a
//         record per row:
//           int8 q[K']           value = scale * q
//           float scale          max|x| / 127 of the row; q = x * (127 / max), to nearest even
//           int32 sum            of q
//           int32 sums[K'/256]   of each 256 q, rounded up
//         The rules of small maxima, infinities and NaNs are those of int8 with the row for the
//         block. Written by whole rows only.
//   bf16  K' bfloat16 values, round-to-nearest-even, padding zeros.
//   f32   K' floats, padding zeros.
//
// Rows start at multiples of 64 bytes. The decode arithmetic is int8: a row's result then depends
// on that row alone, whatever the batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ops/cost.h"

namespace effinfer::ops {

enum class Arithmetic : uint8_t { int8, bf16, f32, int8_token };

inline constexpr int64_t kScaleBlock = 16;       // values under one scale
inline constexpr int64_t kOperandBlock = 32;     // values that a producer writes at once
inline constexpr int64_t kOperandPad = 64;       // K is padded to whole superblocks of the weights
inline constexpr float kSmallestBlock = 1e-36f;  // 127 / max stays finite above it

[[gnu::always_inline]] inline constexpr int64_t padded_cols(int64_t cols) {
  return (cols + kOperandPad - 1) / kOperandPad * kOperandPad;
}

[[gnu::always_inline]] inline constexpr int64_t operand_row_bytes(Arithmetic arithmetic,
                                                                  int64_t cols) {
  const int64_t k = padded_cols(cols);
  const int64_t bytes = arithmetic == Arithmetic::int8   ? k + k / 16 * 8 + k / 32 * 4
                        : arithmetic == Arithmetic::bf16 ? k * 2
                        : arithmetic == Arithmetic::f32  ? k * 4
                                                         : k + 8 + (k + 255) / 256 * 4;
  // Lines of a dozen rows are in use at once: at a distance of 1, 2 or 4 KB they would compete for
  // the same few sets of the first cache.
  const int64_t rounded = (bytes + 63) / 64 * 64;
  return rounded % 1024 == 0 ? rounded + 64 : rounded;
}

struct Operand {
  Arithmetic arithmetic = Arithmetic::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  void* data = nullptr;  // rows x operand_row_bytes, 64-byte aligned

  int64_t row_bytes() const { return operand_row_bytes(arithmetic, cols); }
  uint8_t* row(int64_t index) const { return static_cast<uint8_t*>(data) + index * row_bytes(); }
};

// Views into an int8 row record.
struct Int8Row {
  const int8_t* q;
  const float* scales;    // per 16 values
  const int32_t* biases;  // per 16 values: -128 * sum of q
  const float* scaled;    // per 32 values: sum of scale * q

  // scale * sum of q of one block of 16.
  [[gnu::always_inline]] float scaled16(int64_t block) const {
    return scales[block] * (static_cast<float>(biases[block]) * -0x1p-7f);
  }
};
inline Int8Row int8_row(const Operand& x, int64_t index) {
  const uint8_t* row = x.row(index);
  const int64_t k = padded_cols(x.cols);
  return {reinterpret_cast<const int8_t*>(row), reinterpret_cast<const float*>(row + k),
          reinterpret_cast<const int32_t*>(row + k + k / 16 * 4),
          reinterpret_cast<const float*>(row + k + k / 16 * 8)};
}

// Views into an int8_token row record. Kernels may read 16 bytes beyond q, which the record has.
struct TokenRow {
  const int8_t* q;
  float scale;
  int32_t sum;
  const int32_t* sums;  // per 256 values
};
inline TokenRow token_row(const Operand& x, int64_t index) {
  const uint8_t* row = x.row(index);
  const int64_t k = padded_cols(x.cols);
  return {reinterpret_cast<const int8_t*>(row), *reinterpret_cast<const float*>(row + k),
          *reinterpret_cast<const int32_t*>(row + k + 4),
          reinterpret_cast<const int32_t*>(row + k + 8)};
}

// The conversion alone: f32 rows to an operand. One row is one chunk.
struct ToOperandProblem {
  const float* x = nullptr;  // [rows, cols]
  int64_t x_stride = 0;      // floats between rows
  Operand out;
};
std::string describe(const ToOperandProblem& problem);
Cost cost(const ToOperandProblem& problem);

std::string_view name(Arithmetic arithmetic);

}  // namespace effinfer::ops
