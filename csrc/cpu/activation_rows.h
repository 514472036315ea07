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
  [[gnu::always_inline]] static void store_int8(uint8_t* record, int64_t padded, int64_t block,
                                                const float* values) {
    // Magnitudes of floats order like their bits; infinities and NaNs come last.
    uint32_t max_bits = 0;
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu;
      max_bits = bits > max_bits ? bits : max_bits;
    }
    const float max = std::bit_cast<float>(max_bits);
    int8_t q[kBlock] = {};
    int32_t sums[2] = {};
    float scale = 0.0f;
    if (max_bits >= 0x7f800000u) {
      scale = std::numeric_limits<float>::quiet_NaN();
    } else if (max >= kernels::kSmallestBlock) {
      scale = max / 127.0f;
      const float inverse = 127.0f / max;
      // Adding 1.5 * 2^23 leaves the integer nearest to the value, ties to even, in the low bits.
      constexpr float kRound = 12582912.0f;
      int32_t rounded[kBlock];
      for (int i = 0; i < kBlock; ++i) {
        rounded[i] =
            std::bit_cast<int32_t>(values[i] * inverse + kRound) - std::bit_cast<int32_t>(kRound);
      }
      for (int i = 0; i < kBlock; ++i) q[i] = static_cast<int8_t>(rounded[i]);
      // By halves, so that the compiler keeps the sums in vectors.
      for (int half = 0; half < 2; ++half) {
        int32_t* values16 = rounded + 16 * half;
        for (int i = 0; i < 8; ++i) values16[i] += values16[8 + i];
        for (int i = 0; i < 4; ++i) values16[i] += values16[4 + i];
        sums[half] = values16[0] + values16[1] + values16[2] + values16[3];
      }
    }
    const float scaled_sum = scale * static_cast<float>(sums[0] + sums[1]);
    const int16_t sums16[2] = {static_cast<int16_t>(sums[0]), static_cast<int16_t>(sums[1])};
    std::memcpy(record + block * kBlock, q, sizeof(q));
    std::memcpy(record + padded + block * 4, &scale, 4);
    std::memcpy(record + padded + padded / 8 + block * 4, &scaled_sum, 4);
    std::memcpy(record + padded + padded / 4 + block * 4, sums16, 4);
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
