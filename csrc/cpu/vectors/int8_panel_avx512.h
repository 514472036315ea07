// Int8 matmul of many rows for AVX-512 VNNI: the weights are unpacked once for all of them, and a
// broadcast of activations serves two groups, so that the multipliers wait neither for unpacking
// nor for loads. The arithmetic is that of matmul_int8.simd.cpp, bit for bit.
//
// A superblock of a group in a panel: 16 field lines of bytes, then the 16 rows' float scales of
// each sub-block, then the minima if there are any.
#pragma once

#include <bit>

#include "cpu/quantised_formats.h"
#include "cpu/vectors/packed_avx512.h"
#include "cpu/vectors/token_rows.h"
#include "ops/operand.h"

namespace effinfer::cpu::avx512 {
namespace {

struct Int8Panel {
  // 8 running sums, 8 integers and 8 products of 4 tokens x 2 groups, of 32 registers.
  static constexpr int kTokens = 4;
  static constexpr int kUnits = 4;
  static constexpr int64_t kStretch = 256;
  static constexpr int kStreamTiles = 0;

  static const uint8_t* panel(const PackedWeight& weight, int64_t group_index, int64_t k,
                              int64_t count, uint8_t* scratch) {
    const uint8_t* group = weight.group(group_index);
    with_quantised_format(weight.format, [&]<PackedFormat format>() {
      constexpr Kind kKind = kind_of(format);
      uint8_t* out = scratch;
      for (int64_t i = 0; i < count; i += ops::kSuperblock, out += superblock_bytes(kKind)) {
        unpack<format>(weight, group, (k + i) / ops::kSuperblock, out);
      }
    });
    return scratch;
  }

  static void multiply(const PackedFormat& format, const uint8_t* const* panels, int64_t first_k,
                       int64_t count, const TokenRows& given, int tokens, float (*sums)[32]) {
    const ops::Int8Row row = ops::int8_row({ops::Arithmetic::int8, 1, given.cols, given.data}, 0);
    const Rows rows = {reinterpret_cast<const uint8_t*>(row.q + first_k),
                       reinterpret_cast<const uint8_t*>(row.scales + first_k / 16),
                       reinterpret_cast<const uint8_t*>(row.biases + first_k / 16),
                       reinterpret_cast<const uint8_t*>(row.scaled + first_k / 32),
                       given.stride,
                       format.zero == 0 ? 0 : std::countr_zero(128u / format.zero)};
    const int64_t superblocks = count / ops::kSuperblock;
    unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
      if (tokens != index + 1) return;
      constexpr int kCount = index + 1;
      if (format.sub_block == 32 && format.has_min) {
        multiply_tile<Kind{32, true}, kCount>(panels, superblocks, rows, sums);
      } else if (format.sub_block == 32) {
        multiply_tile<Kind{32, false}, kCount>(panels, superblocks, rows, sums);
      } else if (format.has_min) {
        multiply_tile<Kind{16, true}, kCount>(panels, superblocks, rows, sums);
      } else {
        multiply_tile<Kind{16, false}, kCount>(panels, superblocks, rows, sums);
      }
    });
  }

 private:
  // What the arithmetic of a format depends on. Those without minima have a zero.
  struct Kind {
    int sub_block;
    bool has_min;
  };
  static constexpr Kind kind_of(const PackedFormat& format) {
    return {format.sub_block, format.has_min};
  }
  static constexpr int64_t affine_bytes(Kind kind) { return 64 / kind.sub_block * 64; }
  static constexpr int64_t superblock_bytes(Kind kind) {
    return 1024 + affine_bytes(kind) * (kind.has_min ? 2 : 1);
  }

  // The first row's arrays from the panel's first k on; other rows follow at `stride`.
  struct Rows {
    const uint8_t* q;
    const uint8_t* scales;
    const uint8_t* biases;
    const uint8_t* scaled;
    int64_t stride;
    int zero_shift;  // biases are 2^zero_shift times what the zero adds
  };

  template <PackedFormat format>
  static void unpack(const PackedWeight& weight, const uint8_t* group, int64_t s, uint8_t* out) {
    constexpr Kind kKind = kind_of(format);
    const uint8_t* data =
        group + ops::header_bytes(format, weight.cols) + s * ops::superblock_bytes(format);
    unroll<16>([&](auto line) __attribute__((always_inline)) {
      _mm512_store_si512(out + line * 64, load_operand<format.bits, line>(data));
    });
    unroll<64 / format.sub_block>([&](auto sub) __attribute__((always_inline)) {
      const Affine affine = load_affine<format>(weight, group, data, s, sub);
      _mm512_store_ps(out + 1024 + sub * 64, affine.scale);
      if constexpr (format.has_min) {
        _mm512_store_ps(out + 1024 + affine_bytes(kKind) + sub * 64, affine.min);
      }
    });
  }

  template <Kind kind, int tokens>
  static void multiply_tile(const uint8_t* const* panels, int64_t superblocks, Rows rows,
                            float (*sums)[32]) {
    __m512 sum[tokens][2];
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) sum[t][g] = _mm512_loadu_ps(sums[t] + 16 * g);
    }
    const uint8_t* panel[2] = {panels[0], panels[1]};
    for (int64_t s = 0; s < superblocks; ++s) {
      add_superblock<kind, tokens>(panel, rows, sum);
      for (int g = 0; g < 2; ++g) panel[g] += superblock_bytes(kind);
      rows.q += 64;
      rows.scales += 16;
      rows.biases += 16;
      rows.scaled += 8;
    }
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) _mm512_storeu_ps(sums[t] + 16 * g, sum[t][g]);
    }
  }

  template <Kind kind, int tokens>
  [[gnu::always_inline]] static void add_superblock(const uint8_t* const* panel, const Rows& rows,
                                                    __m512 (*sum)[2]) {
    constexpr int kHalves = kind.sub_block / 16;  // blocks of the operand under one scale
    unroll<64 / kind.sub_block>([&](auto sub) __attribute__((always_inline)) {
      __m512 product[tokens][2];
      unroll<kHalves>([&](auto half) __attribute__((always_inline)) {
        constexpr int block = sub * kHalves + half;
        __m512i integer[tokens][2];
        dot_block<kind, block, tokens>(panel, rows, integer);
        for (int t = 0; t < tokens; ++t) {
          const __m512 scale = broadcast_float(rows.scales + t * rows.stride + block * 4);
          for (int g = 0; g < 2; ++g) {
            const __m512 value = _mm512_cvtepi32_ps(integer[t][g]);
            product[t][g] = half == 0 ? _mm512_mul_ps(value, scale)
                                      : _mm512_fmadd_ps(value, scale, product[t][g]);
          }
        }
      });
      for (int g = 0; g < 2; ++g) {
        const __m512 scale = _mm512_load_ps(panel[g] + 1024 + sub * 64);
        for (int t = 0; t < tokens; ++t) {
          sum[t][g] = _mm512_fmadd_ps(product[t][g], scale, sum[t][g]);
        }
      }
      if constexpr (kind.has_min) add_minima<kind, sub, tokens>(panel, rows, sum);
    });
  }

  template <Kind kind, int sub, int tokens>
  [[gnu::always_inline]] static void add_minima(const uint8_t* const* panel, const Rows& rows,
                                                __m512 (*sum)[2]) {
    for (int t = 0; t < tokens; ++t) {
      __m512 scaled;
      if constexpr (kind.sub_block == 32) {
        scaled = broadcast_float(rows.scaled + t * rows.stride + sub * 4);
      } else {
        int32_t bias;
        std::memcpy(&bias, rows.biases + t * rows.stride + sub * 4, sizeof(bias));
        float scale;
        std::memcpy(&scale, rows.scales + t * rows.stride + sub * 4, sizeof(scale));
        scaled = _mm512_set1_ps(scale * (static_cast<float>(bias) * -0x1p-7f));
      }
      for (int g = 0; g < 2; ++g) {
        const __m512 min = _mm512_load_ps(panel[g] + 1024 + affine_bytes(kind) + sub * 64);
        sum[t][g] = _mm512_fmadd_ps(min, scaled, sum[t][g]);
      }
    }
  }

  // integer[t][g] = the sums over block `block` of 16 k of the superblock.
  template <Kind kind, int block, int tokens>
  [[gnu::always_inline]] static void dot_block(const uint8_t* const* panel, const Rows& rows,
                                               __m512i (*integer)[2]) {
    for (int t = 0; t < tokens; ++t) {
      __m512i bias = _mm512_setzero_si512();
      if constexpr (!kind.has_min) {
        bias = _mm512_srai_epi32(broadcast_dword(rows.biases + t * rows.stride + block * 4),
                                 static_cast<unsigned>(rows.zero_shift));
      }
      for (int g = 0; g < 2; ++g) integer[t][g] = bias;
    }
    unroll<4>([&](auto step) __attribute__((always_inline)) {
      constexpr int line = 4 * block + step;
      const __m512i weights[2] = {load(panel[0] + line * 64), load(panel[1] + line * 64)};
      for (int t = 0; t < tokens; ++t) {
        const __m512i value = broadcast_dword(rows.q + t * rows.stride + line * 4);
        for (int g = 0; g < 2; ++g) {
          integer[t][g] = _mm512_dpbusd_epi32(integer[t][g], weights[g], value);
        }
      }
    });
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx512
