// Reading packed weights with AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/vectors/unroll.h"
#include "ops/packed_weight.h"

namespace effinfer::cpu::avx512 {
namespace {

using ops::PackedFormat;
using ops::PackedWeight;
using ops::QuantBits;
using ops::ScaleKind;

[[gnu::always_inline]] inline __m512i load(const uint8_t* data) {
  return _mm512_loadu_si512(data);
}

[[gnu::always_inline]] inline __m512 load_halves(const uint8_t* data) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)));
}

// 4 bytes at any address, as broadcast by the instruction that uses them.
[[gnu::always_inline]] inline __m512i broadcast_dword(const void* data) {
  int32_t dword;
  std::memcpy(&dword, data, sizeof(dword));
  return _mm512_set1_epi32(dword);
}

[[gnu::always_inline]] inline __m512 broadcast_float(const void* data) {
  return _mm512_castsi512_ps(broadcast_dword(data));
}

// Bits of `high` at position `from` of each byte, moved to position 4 and masked.
template <int from>
[[gnu::always_inline]] inline __m512i move_high(__m512i high) {
  if constexpr (from < 4) return _mm512_slli_epi16(high, 4 - from);
  if constexpr (from > 4) return _mm512_srli_epi16(high, from - 4);
  return high;
}

// Field line `line` of a superblock as bytes: it multiplies activation dword `line`.
template <QuantBits bits, int line>
[[gnu::always_inline]] inline __m512i load_operand(const uint8_t* data) {
  if constexpr (bits == QuantBits::u8) {
    return load(data + line * 64);
  } else {
    constexpr int f = line / 8;
    constexpr int i = line % 8;
    const __m512i nibbles = load(data + i * 64);
    const __m512i low =
        _mm512_and_si512(f == 0 ? nibbles : _mm512_srli_epi16(nibbles, 4), _mm512_set1_epi8(15));
    constexpr int kOr = 0xf8;  // a | (b & c)
    if constexpr (bits == QuantBits::u5) {
      const __m512i high = move_high<i>(load(data + (8 + f) * 64));
      return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(16), kOr);
    } else if constexpr (bits == QuantBits::u6) {
      const __m512i high = move_high<2 * (i % 4)>(load(data + (8 + 2 * f + i / 4) * 64));
      return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(48), kOr);
    } else {
      return low;
    }
  }
}

[[gnu::always_inline]] inline __m128i load_bytes(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Scales and minima of the 16 rows in one sub-block: w = scale * (q - zero) + min.
struct Affine {
  __m512 scale;
  __m512 min;
};

// Sub-block `sub` of superblock `s`, whose bytes are at `data`.
template <PackedFormat format>
[[gnu::always_inline]] inline Affine load_affine(const PackedWeight& weight, const uint8_t* group,
                                                 const uint8_t* data, int64_t s, int sub) {
  const uint8_t* scales = data + ops::quant_bytes(format.bits);
  const uint8_t* mins = data + ops::min_offset(format);
  Affine affine{_mm512_setzero_ps(), _mm512_setzero_ps()};
  if constexpr (format.scales == ScaleKind::direct) {
    affine.scale = load_halves(scales + sub * 32);
    if constexpr (format.has_min) affine.min = load_halves(mins + sub * 32);
    return affine;
  }
  const uint8_t* header = group + s / 4 * 32;
  affine.scale = _mm512_mul_ps(
      load_halves(header), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(scales + sub * 16))));
  if constexpr (format.has_min) {
    const __m512 product =
        _mm512_mul_ps(load_halves(header + ops::header_row_bytes(weight.cols)),
                      _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_bytes(mins + sub * 16))));
    affine.min = _mm512_xor_ps(product, _mm512_set1_ps(-0.0f));
  }
  return affine;
}

// Field line `line` of 4-bit quants as floats. The permutation uses the low four bits of an index
// only: a look-up saves a mask and a conversion.
template <PackedFormat format, int line>
[[gnu::always_inline]] inline void look_up(const uint8_t* data, const Affine& affine,
                                           __m512* values) {
  const __m512i nibbles = load(data + line % 8 * 64);
  static_assert(!format.has_min || format.zero == 0);
  const __m512 table =
      _mm512_sub_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                    _mm512_set1_ps(format.zero));
  for (int j = 0; j < 4; ++j) {
    const __m512i index = _mm512_srli_epi32(nibbles, 8 * j + line / 8 * 4);
    const __m512 q = _mm512_permutexvar_ps(index, table);
    // Without minima, affine.min stands for -zero * scale, which the table holds already.
    values[j] = format.has_min ? _mm512_fmadd_ps(q, affine.scale, affine.min)
                               : _mm512_mul_ps(q, affine.scale);
  }
}

// One superblock as floats: emit(line, v) with v[j] = the 16 rows at k = 4 * line + j, for lines
// 0..15 in order. q * scale - zero * scale is exact where scale * (q - zero) is, and rounds
// alike where it is not: zero is a power of two, so the fused product and sum round once.
template <PackedFormat format, class Emit>
[[gnu::always_inline]] inline void dequantize_superblock(const PackedWeight& weight,
                                                         const uint8_t* group, int64_t s,
                                                         Emit&& emit) {
  const uint8_t* data =
      group + ops::header_bytes(format, weight.cols) + s * ops::superblock_bytes(format);
  unroll<64 / format.sub_block>([&](auto sub) __attribute__((always_inline)) {
    Affine affine = load_affine<format>(weight, group, data, s, sub);
    if constexpr (!format.has_min) {
      affine.min = _mm512_mul_ps(affine.scale, _mm512_set1_ps(-float{format.zero}));
    }
    unroll<format.sub_block / 4>([&](auto step) __attribute__((always_inline)) {
      constexpr int line = sub * (format.sub_block / 4) + step;
      __m512 values[4];
      if constexpr (format.bits == QuantBits::u4) {
        look_up<format, line>(data, affine, values);
        emit(line, values);
        return;
      }
      const __m512i operand = load_operand<format.bits, line>(data);
      for (int j = 0; j < 4; ++j) {
        const __m512i q =
            _mm512_and_si512(_mm512_srli_epi32(operand, 8 * j), _mm512_set1_epi32(255));
        values[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), affine.scale, affine.min);
      }
      emit(line, values);
    });
  });
}

}  // namespace
}  // namespace effinfer::cpu::avx512
