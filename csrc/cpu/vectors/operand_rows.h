// Rounding of activations to an operand: on vectors of 16 floats, or in loops of a fixed trip count
// that the compiler turns into its widest vectors.
// The operations are IEEE single additions, multiplications and divisions in one order, so the bits
// agree at all levels.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/float16.h"
#include "cpu/vectors/float_vector.h"
#include "ops/operand.h"
#include "ops/packed_weight.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

struct OperandRows {
  static constexpr int kBlock = static_cast<int>(ops::kOperandBlock);

  // Block `block` (32 values) of a row.
  [[gnu::always_inline]] static void store_block(const ops::Operand& out, int64_t row,
                                                 int64_t block, const float* values) {
    uint8_t* record = out.row(row);
    switch (out.arithmetic) {
      case ops::Arithmetic::int8:
        store_int8_block(record, ops::padded_cols(out.cols), block, values);
        break;
      case ops::Arithmetic::bf16: {
        uint16_t rounded[kBlock];
        for (int i = 0; i < kBlock; ++i) rounded[i] = f32_to_bf16(values[i]);
        std::memcpy(record + block * kBlock * 2, rounded, sizeof(rounded));
        break;
      }
      case ops::Arithmetic::f32:
        std::memcpy(record + block * kBlock * 4, values, kBlock * 4);
        break;
      case ops::Arithmetic::int8_token:  // by whole rows
        break;
    }
  }

  // The zeros between the last block of a row and its padded end: at most one block.
  [[gnu::always_inline]] static void store_padding(const ops::Operand& out, int64_t row) {
    const int64_t blocks = (out.cols + kBlock - 1) / kBlock;
    if (blocks * kBlock == ops::padded_cols(out.cols)) return;
    const float zeros[kBlock] = {};
    store_block(out, row, blocks, zeros);
  }

  static void store_blocks(const ops::Operand& out, int64_t row, int64_t first, int64_t count,
                           const float* values) {
    for (int64_t i = 0; i < count; ++i) store_block(out, row, first + i, values + i * kBlock);
    if ((first + count) * kBlock == out.cols) store_padding(out, row);
  }

  static void store_row(const ops::Operand& out, int64_t row, const float* values) {
    if (out.arithmetic == ops::Arithmetic::int8_token) {
      return store_token_row(out.row(row), out.cols, values);
    }
    const int64_t whole = out.cols / kBlock;
    for (int64_t block = 0; block < whole; ++block) {
      store_block(out, row, block, values + block * kBlock);
    }
    if (whole * kBlock < out.cols) {
      float last[kBlock] = {};
      std::memcpy(last, values + whole * kBlock, static_cast<size_t>(out.cols % kBlock) * 4);
      store_block(out, row, whole, last);
    }
    store_padding(out, row);
  }

 private:
  // 16 values of a row of `cols`, with zeros behind its end.
  [[gnu::always_inline]] static F32x16 load_part(const float* values, int64_t first, int64_t cols) {
    if (first + 16 <= cols) return F32x16::load(values + first);
    float part[16] = {};
    if (first < cols) std::memcpy(part, values + first, static_cast<size_t>(cols - first) * 4);
    return F32x16::load(part);
  }

  static void store_token_row(uint8_t* record, int64_t cols, const float* values) {
    constexpr int64_t kSums = ops::kTernaryBlock;
    const int64_t padded = ops::padded_cols(cols);
    int32_t max_bits = 0;
    for (int64_t i = 0; i < cols; i += 16) {
      const int32_t bits = largest_magnitude(load_part(values, i, cols));
      max_bits = bits > max_bits ? bits : max_bits;
    }
    const float max = std::bit_cast<float>(max_bits);
    const bool finite = max_bits < 0x7f800000;
    const bool zero = !finite || !(max >= ops::kSmallestBlock);
    int32_t total = 0;
    for (int64_t first = 0; first < padded; first += kSums) {
      const int64_t last = first + kSums < padded ? first + kSums : padded;
      int32_t sum = 0;
      if (zero) {
        std::memset(record + first, 0, static_cast<size_t>(last - first));
      } else {
        const F32x16 factor = F32x16::set(127.0f / max);
        for (int64_t i = first; i < last; i += 16) {
          sum += store_int8(load_part(values, i, cols) * factor,
                            reinterpret_cast<int8_t*>(record) + i);
        }
      }
      std::memcpy(record + padded + 8 + first / kSums * 4, &sum, 4);
      total += sum;
    }
    const float scale = !finite ? std::numeric_limits<float>::quiet_NaN()
                        : zero  ? 0.0f
                                : max / 127.0f;
    std::memcpy(record + padded, &scale, 4);
    std::memcpy(record + padded + 4, &total, 4);
  }

  static constexpr int kScale = static_cast<int>(ops::kScaleBlock);

  struct Rounded {
    float scale;
    int32_t sum;
  };

  // The values of one scale as int8.
  [[gnu::always_inline]] static Rounded round_block(const float* values, int8_t* q) {
    const F32x16 x = F32x16::load(values);
    const int32_t max_bits = largest_magnitude(x);
    const float max = std::bit_cast<float>(max_bits);
    if (max_bits >= 0x7f800000 || !(max >= ops::kSmallestBlock)) {
      std::memset(q, 0, kScale);
      return {max_bits >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f, 0};
    }
    const int32_t sum = store_int8(x * F32x16::set(127.0f / max), q);
    return {max / 127.0f, sum};
  }

  [[gnu::always_inline]] static void store_int8_block(uint8_t* record, int64_t padded,
                                                      int64_t block, const float* values) {
    int8_t q[kBlock];
    const Rounded first = round_block(values, q);
    const Rounded second = round_block(values + kScale, q + kScale);
    const float scales[2] = {first.scale, second.scale};
    const int32_t biases[2] = {-128 * first.sum, -128 * second.sum};
    const float scaled =
        first.scale * static_cast<float>(first.sum) + second.scale * static_cast<float>(second.sum);
    std::memcpy(record + block * kBlock, q, sizeof(q));
    std::memcpy(record + padded + block * 8, scales, 8);
    std::memcpy(record + padded + padded / 4 + block * 8, biases, 8);
    std::memcpy(record + padded + padded / 2 + block * 4, &scaled, 4);
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
