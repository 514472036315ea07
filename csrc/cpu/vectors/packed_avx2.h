// Reading packed weights with AVX2, half a line (8 rows x 4 k) at a time.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/vectors/unroll.h"
#include "ops/packed_weight.h"

namespace effinfer::cpu::avx2 {
namespace {

using ops::PackedFormat;
using ops::PackedWeight;
using ops::QuantBits;
using ops::ScaleKind;

[[gnu::always_inline]] inline __m256i load(const uint8_t* data) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

[[gnu::always_inline]] inline __m256 load_halves(const uint8_t* data) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
}

[[gnu::always_inline]] inline __m256i broadcast_dword(const void* data) {
  int32_t dword;
  std::memcpy(&dword, data, sizeof(dword));
  return _mm256_set1_epi32(dword);
}

// Bits of `high` at position `from` of each byte, moved to position 4.
template <int from>
[[gnu::always_inline]] inline __m256i move_high(__m256i high) {
  if constexpr (from < 4) return _mm256_slli_epi16(high, 4 - from);
  if constexpr (from > 4) return _mm256_srli_epi16(high, from - 4);
  return high;
}

// Half of field line `line` of a superblock as bytes: it multiplies activation dword `line` by 8
// rows. `data` is the superblock, plus 32 for rows 8..15.
template <QuantBits bits, int line>
[[gnu::always_inline]] inline __m256i load_operand(const uint8_t* data) {
  if constexpr (bits == QuantBits::u8) {
    return load(data + line * 64);
  } else {
    constexpr int f = line / 8;
    constexpr int i = line % 8;
    const __m256i nibbles = load(data + i * 64);
    const __m256i low =
        _mm256_and_si256(f == 0 ? nibbles : _mm256_srli_epi16(nibbles, 4), _mm256_set1_epi8(15));
    if constexpr (bits == QuantBits::u5) {
      const __m256i high = move_high<i>(load(data + (8 + f) * 64));
      return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(16)));
    } else if constexpr (bits == QuantBits::u6) {
      const __m256i high = move_high<2 * (i % 4)>(load(data + (8 + 2 * f + i / 4) * 64));
      return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(48)));
    } else {
      return low;
    }
  }
}

// Scales and minima of 8 rows in one sub-block: w = scale * (q - zero) + min.
struct Affine {
  __m256 scale;
  __m256 min;
};

// Rows 8 * half.. of sub-block `sub` of superblock `s`, whose bytes are at `data`.
template <PackedFormat format>
[[gnu::always_inline]] inline Affine load_affine(const PackedWeight& weight, const uint8_t* group,
                                                 const uint8_t* data, int64_t s, int sub,
                                                 int half) {
  const auto load_bytes = [](const uint8_t* bytes) __attribute__((always_inline)) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  };
  const uint8_t* scales = data + ops::quant_bytes(format.bits);
  const uint8_t* mins = data + ops::min_offset(format);
  Affine affine{_mm256_setzero_ps(), _mm256_setzero_ps()};
  if constexpr (format.scales == ScaleKind::direct) {
    affine.scale = load_halves(scales + sub * 32 + half * 16);
    if constexpr (format.has_min) affine.min = load_halves(mins + sub * 32 + half * 16);
    return affine;
  }
  const uint8_t* header = group + s / 4 * 32 + half * 16;
  const int index = sub * 16 + half * 8;
  affine.scale = _mm256_mul_ps(
      load_halves(header), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(scales + index))));
  if constexpr (format.has_min) {
    const __m256 product =
        _mm256_mul_ps(load_halves(header + ops::header_row_bytes(weight.cols)),
                      _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_bytes(mins + index))));
    affine.min = _mm256_xor_ps(product, _mm256_set1_ps(-0.0f));
  }
  return affine;
}

}  // namespace
}  // namespace effinfer::cpu::avx2
