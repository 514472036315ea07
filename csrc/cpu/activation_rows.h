// Rounding of activations to an operand, written once and compiled for each ISA level: loops of a
// fixed trip count that the compiler turns into its widest vectors. The operations are IEEE
// single additions, multiplications and divisions in one order, so the bits agree at all levels.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/float16.h"
#include "effinfer/threads.h"
#include "kernels/activation.h"

namespace effinfer::cpu {

// `Level` is a type of the including file's anonymous namespace: the code then has internal linkage
// and never replaces that of another level.
template <class Level>
struct ActivationRows {
  static constexpr int kBlock = static_cast<int>(kernels::kActivationBlock);

  // Block `block` (32 values) of a row.
  [[gnu::always_inline]] static void store_block(const kernels::Activation& out, int64_t row,
                                                 int64_t block, const float* values) {
    uint8_t* record = out.row(row);
    switch (out.arithmetic) {
      case kernels::Arithmetic::int8:
        store_int8(record, kernels::padded_cols(out.cols), block, values);
        break;
      case kernels::Arithmetic::bf16: {
        uint16_t rounded[kBlock];
        for (int i = 0; i < kBlock; ++i) rounded[i] = f32_to_bf16(values[i]);
        std::memcpy(record + block * kBlock * 2, rounded, sizeof(rounded));
        break;
      }
      case kernels::Arithmetic::f32:
        std::memcpy(record + block * kBlock * 4, values, kBlock * 4);
        break;
    }
  }

  // The zeros between the last block of a row and its padded end: at most one block.
  [[gnu::always_inline]] static void store_padding(const kernels::Activation& out, int64_t row) {
    const int64_t blocks = (out.cols + kBlock - 1) / kBlock;
    if (blocks * kBlock == kernels::padded_cols(out.cols)) return;
    const float zeros[kBlock] = {};
    store_block(out, row, blocks, zeros);
  }

  static void store_blocks(const kernels::Activation& out, int64_t row, int64_t first,
                           int64_t count, const float* values) {
    for (int64_t i = 0; i < count; ++i) store_block(out, row, first + i, values + i * kBlock);
    if ((first + count) * kBlock == out.cols) store_padding(out, row);
  }

  static void store_row(const kernels::Activation& out, int64_t row, const float* values) {
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
  static constexpr int kScale = static_cast<int>(kernels::kScaleBlock);

  struct Rounded {
    float scale;
    int32_t sum;
  };

  // The values of one scale as int8.
  [[gnu::always_inline]] static Rounded round_block(const float* values, int8_t* q) {
    // Magnitudes of floats order like their bits; infinities and NaNs come last.
    uint32_t max_bits = 0;
    for (int i = 0; i < kScale; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu;
      max_bits = bits > max_bits ? bits : max_bits;
    }
    const float max = std::bit_cast<float>(max_bits);
    std::memset(q, 0, kScale);
    if (max_bits >= 0x7f800000u) return {std::numeric_limits<float>::quiet_NaN(), 0};
    if (!(max >= kernels::kSmallestBlock)) return {0.0f, 0};
    const float inverse = 127.0f / max;
    // Adding 1.5 * 2^23 leaves the integer nearest to the value, ties to even, in the low bits.
    constexpr float kRound = 12582912.0f;
    int32_t rounded[kScale];
    for (int i = 0; i < kScale; ++i) {
      rounded[i] =
          std::bit_cast<int32_t>(values[i] * inverse + kRound) - std::bit_cast<int32_t>(kRound);
    }
    for (int i = 0; i < kScale; ++i) q[i] = static_cast<int8_t>(rounded[i]);
    // By halves, so that the compiler keeps the sums in vectors.
    for (int i = 0; i < 8; ++i) rounded[i] += rounded[8 + i];
    for (int i = 0; i < 4; ++i) rounded[i] += rounded[4 + i];
    return {max / 127.0f, rounded[0] + rounded[1] + rounded[2] + rounded[3]};
  }

  [[gnu::always_inline]] static void store_int8(uint8_t* record, int64_t padded, int64_t block,
                                                const float* values) {
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

// One row is one chunk.
template <class Level>
void convert_rows(const kernels::ToActivationProblem& problem, Team& team) {
  team.for_chunks(problem.out.rows, [&](int64_t row) {
    ActivationRows<Level>::store_row(problem.out, row, problem.x + row * problem.x_stride);
  });
}

}  // namespace effinfer::cpu
