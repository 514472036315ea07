// Int8 matmul for AVX2: VPMADDUBSW multiplies half a line (8 rows x 4 k, unsigned) by a broadcast
// dword of activations (signed) and adds pairs of products into int16, saturating. Since
// activations are within +-127, sums of int16 stay exact for so many lines:
//
//   u4   2 * 15 * 127 =  3810 a line, 4 lines  15240 (a block of 16 k, no more is needed)
//   u5   2 * 31 * 127 =  7874 a line, 4 lines  31496
//   u6   2 * 63 * 127 = 16002 a line, 2 lines  32004      all <= 32767
//
// and are then added in pairs into int32. Bytes would saturate at once (2 * 255 * 127 = 64770), so
// u8 quants are taken as signed w = q - 128, and |w| <= 128 multiplies the activation with the sign
// of w: 2 * 128 * 127 = 32512 a line, 1 line.
#pragma once

#include <bit>

#include "cpu/matmul_units.h"
#include "cpu/vectors/packed_avx2.h"
#include "ops/operand.h"

namespace effinfer::cpu::avx2 {
namespace {

using ops::Int8Row;

// Lines of a block of 16 k whose products fit in int16.
constexpr int exact_lines(QuantBits bits) {
  return bits == QuantBits::u4 || bits == QuantBits::u5 ? 4 : bits == QuantBits::u6 ? 2 : 1;
}

struct Int8Dot {
  // 8 int16 sums of 4 tokens x 2 halves leave half of the 16 registers to operands.
  static constexpr int kTokens = 4;

  template <PackedFormat format>
  static void dot(const PackedWeight& weight, int64_t first_group, int groups, const Int8Row* rows,
                  int count, const FetchAhead& ahead, float (*sums)[32]) {
    for (int g = 0; g < groups; ++g) {
      const uint8_t* group = weight.group(first_group + g);
      unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
        if (count != index + 1) return;
        dot_group<format, index + 1>(weight, group, rows, ahead, sums, g * 16);
      });
    }
  }

 private:
  // `tokens` rows of the operand.
  template <PackedFormat format, int tokens>
  static void dot_group(const PackedWeight& weight, const uint8_t* group, const Int8Row* given,
                        const FetchAhead& ahead, float (*sums)[32], int offset) {
    Int8Row rows[tokens];
    for (int t = 0; t < tokens; ++t) rows[t] = given[t];
    constexpr int64_t kBytes = ops::superblock_bytes(format);
    const int64_t header = ops::header_bytes(format, weight.cols);
    ahead.ask_for(group, header);
    const uint8_t* data = group + header;
    const int64_t superblocks = ops::padded_cols(weight.cols) / ops::kSuperblock;
    __m256 sum[2][tokens];
    for (int t = 0; t < tokens; ++t) sum[0][t] = sum[1][t] = _mm256_setzero_ps();
    for (int64_t s = 0; s < superblocks; ++s, data += kBytes) {
      ahead.ask_for(data, kBytes);
      add_superblock<format, tokens>(weight, group, data, s, rows, sum);
    }
    for (int t = 0; t < tokens; ++t) {
      _mm256_storeu_ps(sums[t] + offset, sum[0][t]);
      _mm256_storeu_ps(sums[t] + offset + 8, sum[1][t]);
    }
  }

  template <PackedFormat format, int tokens>
  [[gnu::always_inline]] static void add_superblock(const PackedWeight& weight,
                                                    const uint8_t* group, const uint8_t* data,
                                                    int64_t s, const Int8Row* rows,
                                                    __m256 (*sum)[tokens]) {
    constexpr int kHalves = format.sub_block / 16;  // blocks of the operand under one scale
    unroll<64 / format.sub_block>([&](auto sub) __attribute__((always_inline)) {
      __m256 product[2][tokens];
      unroll<kHalves>([&](auto half) __attribute__((always_inline)) {
        constexpr int block = sub * kHalves + half;
        __m256i integer[2][tokens];
        dot_block<format, block, tokens>(data, s, rows, integer);
        for (int t = 0; t < tokens; ++t) {
          const __m256 scale = _mm256_set1_ps(rows[t].scales[4 * s + block]);
          for (int h = 0; h < 2; ++h) {
            const __m256 value = _mm256_cvtepi32_ps(integer[h][t]);
            product[h][t] = half == 0 ? _mm256_mul_ps(value, scale)
                                      : _mm256_fmadd_ps(value, scale, product[h][t]);
          }
        }
      });
      for (int h = 0; h < 2; ++h) {
        const auto [scale, min] = load_affine<format>(weight, group, data, s, sub, h);
        for (int t = 0; t < tokens; ++t) {
          sum[h][t] = _mm256_fmadd_ps(product[h][t], scale, sum[h][t]);
          if constexpr (format.has_min) {
            const int64_t block = 4 * s + sub;
            const float scaled =
                kHalves == 2 ? rows[t].scaled[2 * s + sub] : rows[t].scaled16(block);
            sum[h][t] = _mm256_fmadd_ps(min, _mm256_set1_ps(scaled), sum[h][t]);
          }
        }
      }
    });
  }

  // integer[half] = the sums over block `block` of 16 k of the superblock: a broadcast of
  // activations serves both halves of a line.
  template <PackedFormat format, int block, int tokens>
  [[gnu::always_inline]] static void dot_block(const uint8_t* data, int64_t s, const Int8Row* rows,
                                               __m256i (*integer)[tokens]) {
    constexpr int kExact = exact_lines(format.bits);
    constexpr bool kBias = format.zero != 0 && format.bits != QuantBits::u8;
    __m256i pairs[2][tokens];
    unroll<4>([&](auto step) __attribute__((always_inline)) {
      constexpr int line = 4 * block + step;
      __m256i operand[2];
      __m256i magnitude[2];
      for (int h = 0; h < 2; ++h) {
        operand[h] = load_operand<format.bits, line>(data + 32 * h);
        magnitude[h] = operand[h];
        if constexpr (format.bits == QuantBits::u8) {
          operand[h] = _mm256_xor_si256(operand[h], _mm256_set1_epi8(-128));
          magnitude[h] = _mm256_abs_epi8(operand[h]);
        }
      }
      for (int t = 0; t < tokens; ++t) {
        const __m256i broadcast = broadcast_dword(rows[t].q + 64 * s + 4 * line);
        for (int h = 0; h < 2; ++h) {
          __m256i a = broadcast;
          if constexpr (format.bits == QuantBits::u8) a = _mm256_sign_epi8(a, operand[h]);
          const __m256i products = _mm256_maddubs_epi16(magnitude[h], a);
          pairs[h][t] = step % kExact == 0 ? products : _mm256_add_epi16(pairs[h][t], products);
          if constexpr (step % kExact == kExact - 1) {
            const __m256i added = _mm256_madd_epi16(pairs[h][t], _mm256_set1_epi16(1));
            integer[h][t] = step < kExact ? added : _mm256_add_epi32(integer[h][t], added);
          }
        }
      }
    });
    if constexpr (kBias) {
      for (int t = 0; t < tokens; ++t) {
        const __m256i bias128 = _mm256_set1_epi32(rows[t].biases[4 * s + block]);
        const __m256i bias = _mm256_srai_epi32(bias128, std::countr_zero(128u / format.zero));
        for (int h = 0; h < 2; ++h) integer[h][t] = _mm256_add_epi32(integer[h][t], bias);
      }
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx2
