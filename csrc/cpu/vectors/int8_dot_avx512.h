// Int8 matmul for AVX-512 VNNI: one VPDPBUSD multiplies a line of 16 rows x 4 k by a broadcast
// dword of activations.
#pragma once

#include <bit>

#include "cpu/matmul_units.h"
#include "cpu/vectors/packed_avx512.h"
#include "ops/operand.h"

namespace effinfer::cpu::avx512 {
namespace {

using ops::Int8Row;
using ops::PackedFormat;
using ops::PackedWeight;

struct Int8Dot {
  static constexpr int kTokens = 8;

  // One group after the other: weights come from memory as one linear stream, which the prefetchers
  // follow better than two side by side, although those share their broadcasts of activations.
  template <PackedFormat format>
  static void dot(const PackedWeight& weight, int64_t first_group, int groups, const Int8Row* rows,
                  int count, const FetchAhead& ahead, float (*sums)[32]) {
    for (int g = 0; g < groups; ++g) {
      const int64_t group = first_group + g;
      const int offset = g * 16;
      switch (count) {
        case 1:
          dot_group<format, 1>(weight, group, rows, count, ahead, sums, offset);
          break;
        case 2:
          dot_group<format, 2>(weight, group, rows, count, ahead, sums, offset);
          break;
        case 3:
        case 4:
          dot_group<format, 4>(weight, group, rows, count, ahead, sums, offset);
          break;
        default:
          dot_group<format, 8>(weight, group, rows, count, ahead, sums, offset);
          break;
      }
    }
  }

 private:
  // A group times `tokens` rows, of which `count` exist: the missing ones repeat the last and are
  // not stored.
  template <PackedFormat format, int tokens>
  static void dot_group(const PackedWeight& weight, int64_t index, const Int8Row* rows, int count,
                        const FetchAhead& ahead, float (*sums)[32], int offset) {
    Int8Row row[tokens];
    for (int t = 0; t < tokens; ++t) row[t] = rows[t < count ? t : count - 1];
    const uint8_t* group = weight.group(index);
    const uint8_t* data = group + ops::header_bytes(format, weight.cols);
    __m512 sum[tokens];
    for (int t = 0; t < tokens; ++t) sum[t] = _mm512_setzero_ps();
    const int64_t superblocks = ops::padded_cols(weight.cols) / ops::kSuperblock;
    for (int64_t s = 0; s < superblocks; ++s) {
      add_superblock<format, tokens>(weight, group, data, s, row, sum);
      ahead.ask_for<ops::superblock_bytes(format), tokens <= 2>(data);
      data += ops::superblock_bytes(format);
    }
    for (int t = 0; t < count; ++t) _mm512_storeu_ps(sums[t] + offset, sum[t]);
  }

  template <PackedFormat format, int tokens>
  [[gnu::always_inline]] static void add_superblock(const PackedWeight& weight,
                                                    const uint8_t* group, const uint8_t* data,
                                                    int64_t s, const Int8Row* row, __m512* sum) {
    constexpr int kHalves = format.sub_block / 16;  // blocks of the operand under one scale
    unroll<64 / format.sub_block>([&](auto sub) __attribute__((always_inline)) {
      __m512 product[tokens];
      unroll<kHalves>([&](auto half) __attribute__((always_inline)) {
        constexpr int block = sub * kHalves + half;
        __m512i integer[tokens];
        dot_block<format, block, tokens>(data, s, row, integer);
        for (int t = 0; t < tokens; ++t) {
          const __m512 scale = _mm512_set1_ps(row[t].scales[4 * s + block]);
          const __m512 value = _mm512_cvtepi32_ps(integer[t]);
          product[t] =
              half == 0 ? _mm512_mul_ps(value, scale) : _mm512_fmadd_ps(value, scale, product[t]);
        }
      });
      const auto [scale, min] = load_affine<format>(weight, group, data, s, sub);
      for (int t = 0; t < tokens; ++t) sum[t] = _mm512_fmadd_ps(product[t], scale, sum[t]);
      if constexpr (format.has_min) {
        for (int t = 0; t < tokens; ++t) {
          const int64_t block = 4 * s + sub;
          const float scaled = kHalves == 2 ? row[t].scaled[2 * s + sub] : row[t].scaled16(block);
          sum[t] = _mm512_fmadd_ps(min, _mm512_set1_ps(scaled), sum[t]);
        }
      }
    });
  }

  // -zero * the sum of a block of activations.
  template <int zero>
  [[gnu::always_inline]] static __m512i bias(int32_t bias128) {
    if constexpr (zero == 0) return _mm512_setzero_si512();
    return _mm512_srai_epi32(_mm512_set1_epi32(bias128), std::countr_zero(128u / zero));
  }

  // integer[t] = the sums over block `block` of 16 k of the superblock.
  template <PackedFormat format, int block, int tokens>
  [[gnu::always_inline]] static void dot_block(const uint8_t* data, int64_t s, const Int8Row* row,
                                               __m512i* integer) {
    for (int t = 0; t < tokens; ++t) integer[t] = bias<format.zero>(row[t].biases[4 * s + block]);
    unroll<4>([&](auto step) __attribute__((always_inline)) {
      constexpr int line = 4 * block + step;
      const __m512i operand = load_operand<format.bits, line>(data);
      for (int t = 0; t < tokens; ++t) {
        integer[t] =
            _mm512_dpbusd_epi32(integer[t], operand, broadcast_dword(row[t].q + 64 * s + 4 * line));
      }
    });
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx512
