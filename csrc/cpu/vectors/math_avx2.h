// The vector types of AVX2 files, and elementary functions of __m256.
#pragma once

#include <immintrin.h>

#include "core/float16.h"
#include "cpu/vectors/math.h"

namespace effinfer::cpu::avx2 {
namespace {

struct F32x8 {
  __m256 v;

  static constexpr int kWidth = 8;
  [[gnu::always_inline]] static F32x8 load(const float* from) { return {_mm256_loadu_ps(from)}; }
  [[gnu::always_inline]] static F32x8 load(const F16* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }
  [[gnu::always_inline]] static F32x8 load(const Bf16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  [[gnu::always_inline]] static F32x8 set(float value) { return {_mm256_set1_ps(value)}; }
  [[gnu::always_inline]] void store(float* to) const { _mm256_storeu_ps(to, v); }
  [[gnu::always_inline]] void store(F16* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  // Rounds as f32_to_bf16 does.
  [[gnu::always_inline]] void store(Bf16* to) const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_add_epi32(bits, half);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256 chosen =
        _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
  }
  [[gnu::always_inline]] friend F32x8 operator+(F32x8 a, F32x8 b) {
    return {_mm256_add_ps(a.v, b.v)};
  }
  [[gnu::always_inline]] friend F32x8 operator-(F32x8 a, F32x8 b) {
    return {_mm256_sub_ps(a.v, b.v)};
  }
  [[gnu::always_inline]] friend F32x8 operator*(F32x8 a, F32x8 b) {
    return {_mm256_mul_ps(a.v, b.v)};
  }
  [[gnu::always_inline]] friend F32x8 operator/(F32x8 a, F32x8 b) {
    return {_mm256_div_ps(a.v, b.v)};
  }
  [[gnu::always_inline]] friend F32x8 fma(F32x8 a, F32x8 b, F32x8 c) {
    return {_mm256_fmadd_ps(a.v, b.v, c.v)};
  }
  [[gnu::always_inline]] friend F32x8 max(F32x8 a, F32x8 b) { return {_mm256_max_ps(a.v, b.v)}; }
  [[gnu::always_inline]] friend F32x8 min(F32x8 a, F32x8 b) { return {_mm256_min_ps(a.v, b.v)}; }
  // Lane i of x where bit i is set, else `other`.
  [[gnu::always_inline]] friend F32x8 keep(uint32_t bits, F32x8 x, F32x8 other) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lanes);
    const __m256 mask = _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes));
    return {_mm256_blendv_ps(other.v, x.v, mask)};
  }
  [[gnu::always_inline]] friend F32x8 abs(F32x8 a) {
    return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)};
  }
  [[gnu::always_inline]] friend F32x8 copysign(F32x8 a, F32x8 b) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_andnot_ps(sign, a.v), _mm256_and_ps(sign, b.v))};
  }
  [[gnu::always_inline]] friend F32x8 zero_below(F32x8 limit, F32x8 x, F32x8 value) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_LT_OQ), value.v)};
  }
  // Multiplies by two factors: n may exceed the exponents of a float by half.
  [[gnu::always_inline]] friend F32x8 power_of_two(F32x8 x, F32x8 t) {
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(t.v),
                                       _mm256_castps_si256(_mm256_set1_ps(simd::kRound)));
    const __m256i first = _mm256_srai_epi32(n, 1);
    const __m256i second = _mm256_sub_epi32(n, first);
    const __m256i one = _mm256_castps_si256(_mm256_set1_ps(1.0f));
    const auto power = [&](__m256i exponent) {
      return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(exponent, 23), one));
    };
    return {_mm256_mul_ps(_mm256_mul_ps(x.v, power(first)), power(second))};
  }
  [[gnu::always_inline]] friend float sum(F32x8 a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  [[gnu::always_inline]] friend float maximum(F32x8 a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
};

using F32x16 = simd::Pair<F32x8>;

// The greatest of the lanes' bits without the sign: magnitudes order like them, infinities and NaNs
// come last.
[[gnu::always_inline]] inline int32_t largest_magnitude(F32x16 x) {
  const __m256i all =
      _mm256_max_epi32(_mm256_castps_si256(abs(x.low).v), _mm256_castps_si256(abs(x.high).v));
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

// Stores lanes within +-127 as the nearest integers, ties to even; returns their sum.
[[gnu::always_inline]] inline int32_t store_int8(F32x16 x, int8_t* to) {
  const __m256i words =
      _mm256_packs_epi32(_mm256_cvtps_epi32(x.low.v), _mm256_cvtps_epi32(x.high.v));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

// Stores lanes within +-32767 as the nearest integers, ties to even.
[[gnu::always_inline]] inline void store_int16(F32x16 x, int16_t* to) {
  const __m256i words =
      _mm256_packs_epi32(_mm256_cvtps_epi32(x.low.v), _mm256_cvtps_epi32(x.high.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(words, 0xd8));
}

[[gnu::always_inline]] inline __m256 vexp(__m256 x) {
  return simd::exp(F32x8{x}).v;
}
[[gnu::always_inline]] inline __m256 vtanh(__m256 x) {
  return simd::tanh(F32x8{x}).v;
}
[[gnu::always_inline]] inline __m256 vsilu(__m256 x) {
  return simd::silu(F32x8{x}).v;
}
[[gnu::always_inline]] inline __m256 vgelu_tanh(__m256 x) {
  return simd::gelu_tanh(F32x8{x}).v;
}

}  // namespace
}  // namespace effinfer::cpu::avx2
