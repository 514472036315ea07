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
      unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
        if (count != index + 1) return;
        dot_group<format, index + 1>(weight, first_group + g, rows, ahead, sums, g * 16);
      });
    }
  }

 private:
  // An array of consecutive rows: a pointer for three of them, since those of eight rows would not
  // fit the general registers.
  template <int tokens>
  class Rows {
   public:
    Rows(const void* first, int64_t stride) : stride_(stride) {
      for (int i = 0; i < kBases; ++i) {
        base_[i] = static_cast<const uint8_t*>(first) + 3 * i * stride;
      }
    }
    [[gnu::always_inline]] const uint8_t* operator[](int row) const {
      return base_[row / 3] + row % 3 * stride_;
    }
    [[gnu::always_inline]] void advance(int64_t bytes) {
      for (int i = 0; i < kBases; ++i) base_[i] += bytes;
    }

   private:
    static constexpr int kBases = (tokens + 2) / 3;
    const uint8_t* base_[kBases];
    int64_t stride_;
  };

  // What `tokens` rows have for one superblock.
  template <int tokens>
  struct Operands {
    Rows<tokens> q;
    Rows<tokens> scales;
    Rows<tokens> biases;
    Rows<tokens> scaled;

    explicit Operands(const Int8Row* rows)
        : Operands(rows[0], tokens > 1 ? rows[1].q - rows[0].q : 0) {}
    [[gnu::always_inline]] void advance() {
      q.advance(64);
      scales.advance(16);
      biases.advance(16);
      scaled.advance(8);
    }

   private:
    Operands(const Int8Row& row, int64_t stride)
        : q(row.q, stride),
          scales(row.scales, stride),
          biases(row.biases, stride),
          scaled(row.scaled, stride) {}
  };

  // A group times `tokens` consecutive rows of an operand.
  template <PackedFormat format, int tokens>
  static void dot_group(const PackedWeight& weight, int64_t index, const Int8Row* rows,
                        const FetchAhead& ahead, float (*sums)[32], int offset) {
    Operands<tokens> row(rows);
    const uint8_t* group = weight.group(index);
    const int64_t header = ops::header_bytes(format, weight.cols);
    ahead.ask_for(group, header);
    const uint8_t* data = group + header;
    __m512 sum[tokens];
    for (int t = 0; t < tokens; ++t) sum[t] = _mm512_setzero_ps();
    const int64_t superblocks = ops::padded_cols(weight.cols) / ops::kSuperblock;
    for (int64_t s = 0; s < superblocks; ++s) {
      add_superblock<format, tokens>(weight, group, data, s, row, sum);
      ahead.ask_for(data, ops::superblock_bytes(format));
      data += ops::superblock_bytes(format);
      row.advance();
    }
    for (int t = 0; t < tokens; ++t) _mm512_storeu_ps(sums[t] + offset, sum[t]);
  }

  template <PackedFormat format, int tokens>
  [[gnu::always_inline]] static void add_superblock(const PackedWeight& weight,
                                                    const uint8_t* group, const uint8_t* data,
                                                    int64_t s, const Operands<tokens>& row,
                                                    __m512* sum) {
    constexpr int kHalves = format.sub_block / 16;  // blocks of the operand under one scale
    unroll<64 / format.sub_block>([&](auto sub) __attribute__((always_inline)) {
      __m512 product[tokens];
      unroll<kHalves>([&](auto half) __attribute__((always_inline)) {
        constexpr int block = sub * kHalves + half;
        __m512i integer[tokens];
        dot_block<format, block, tokens>(data, row, integer);
        for (int t = 0; t < tokens; ++t) {
          const __m512 scale = broadcast_float(row.scales[t] + 4 * block);
          const __m512 value = _mm512_cvtepi32_ps(integer[t]);
          product[t] =
              half == 0 ? _mm512_mul_ps(value, scale) : _mm512_fmadd_ps(value, scale, product[t]);
        }
      });
      const auto [scale, min] = load_affine<format>(weight, group, data, s, sub);
      for (int t = 0; t < tokens; ++t) sum[t] = _mm512_fmadd_ps(product[t], scale, sum[t]);
      if constexpr (format.has_min) {
        for (int t = 0; t < tokens; ++t) {
          sum[t] = _mm512_fmadd_ps(min, scaled<format.sub_block>(row, t, sub), sum[t]);
        }
      }
    });
  }

  // What the minima of sub-block `sub` are multiplied by: scale * the sum of its activations.
  template <int sub_block, int tokens>
  [[gnu::always_inline]] static __m512 scaled(const Operands<tokens>& row, int t, int sub) {
    if constexpr (sub_block == 32) return broadcast_float(row.scaled[t] + 4 * sub);
    float scale;
    int32_t bias;
    std::memcpy(&scale, row.scales[t] + 4 * sub, sizeof(scale));
    std::memcpy(&bias, row.biases[t] + 4 * sub, sizeof(bias));
    return _mm512_set1_ps(Int8Row{nullptr, &scale, &bias, nullptr}.scaled16(0));
  }

  // -zero * the sum of a block of activations.
  template <int zero>
  [[gnu::always_inline]] static __m512i bias(const uint8_t* bias128) {
    if constexpr (zero == 0) return _mm512_setzero_si512();
    return _mm512_srai_epi32(broadcast_dword(bias128), std::countr_zero(128u / zero));
  }

  // integer[t] = the sums over block `block` of 16 k of the superblock.
  template <PackedFormat format, int block, int tokens>
  [[gnu::always_inline]] static void dot_block(const uint8_t* data, const Operands<tokens>& row,
                                               __m512i* integer) {
    for (int t = 0; t < tokens; ++t) integer[t] = bias<format.zero>(row.biases[t] + 4 * block);
    unroll<4>([&](auto step) __attribute__((always_inline)) {
      constexpr int line = 4 * block + step;
      const __m512i operand = load_operand<format.bits, line>(data);
      for (int t = 0; t < tokens; ++t) {
        integer[t] = _mm512_dpbusd_epi32(integer[t], operand, broadcast_dword(row.q[t] + 4 * line));
      }
    });
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx512
