// The vector type of AVX-512 files, and elementary functions of __m512.
#pragma once

#include <immintrin.h>

#include "core/float16.h"
#include "cpu/vectors/math.h"

namespace effinfer::cpu::avx512 {
namespace {

struct F32x16 {
  __m512 v;

  static constexpr int kWidth = 16;
  [[gnu::always_inline]] static F32x16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
  [[gnu::always_inline]] static F32x16 load(const F16* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  }
  [[gnu::always_inline]] static F32x16 load(const Bf16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  [[gnu::always_inline]] static F32x16 set(float value) { return {_mm512_set1_ps(value)}; }
  [[gnu::always_inline]] void store(float* to) const { _mm512_storeu_ps(to, v); }
  [[gnu::always_inline]] void store(F16* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  // Rounds as f32_to_bf16 does.
  [[gnu::always_inline]] void store(Bf16* to) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_add_epi32(bits, half);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
  }
  [[gnu::always_inline]] friend F32x16 operator+(F32x16 a, F32x16 b) {
    return {_mm512_add_ps(a.v, b.v)};
  }
  [[gnu::always_inline]] friend F32x16 operator-(F32x16 a, F32x16 b) {
    return {_mm512_sub_ps(a.v, b.v)};
  }
  [[gnu::always_inline]] friend F32x16 operator*(F32x16 a, F32x16 b) {
    return {_mm512_mul_ps(a.v, b.v)};
  }
  [[gnu::always_inline]] friend F32x16 operator/(F32x16 a, F32x16 b) {
    return {_mm512_div_ps(a.v, b.v)};
  }
  [[gnu::always_inline]] friend F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
  }
  [[gnu::always_inline]] friend F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
  [[gnu::always_inline]] friend F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
  // Lane i of x where bit i is set, else `other`.
  [[gnu::always_inline]] friend F32x16 keep(uint32_t bits, F32x16 x, F32x16 other) {
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), other.v, x.v)};
  }
  [[gnu::always_inline]] friend F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
  [[gnu::always_inline]] friend F32x16 copysign(F32x16 a, F32x16 b) {
    const __m512 sign = _mm512_set1_ps(-0.0f);
    return {_mm512_or_ps(_mm512_andnot_ps(sign, a.v), _mm512_and_ps(sign, b.v))};
  }
  [[gnu::always_inline]] friend F32x16 zero_below(F32x16 limit, F32x16 x, F32x16 value) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), value.v)};
  }
  [[gnu::always_inline]] friend F32x16 power_of_two(F32x16 x, F32x16 t) {
    return {_mm512_scalef_ps(x.v, _mm512_sub_ps(t.v, _mm512_set1_ps(simd::kRound)))};
  }
  // Halves, quarters, ...: lane i with lane i + 8, then + 4, + 2, + 1.
  [[gnu::always_inline]] friend float sum(F32x16 a) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }
  [[gnu::always_inline]] friend float maximum(F32x16 a) {
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
  }
};

// The greatest of the lanes' bits without the sign: magnitudes order like them, infinities and NaNs
// come last.
[[gnu::always_inline]] inline int32_t largest_magnitude(F32x16 x) {
  return _mm512_reduce_max_epi32(
      _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff)));
}

// Stores lanes within +-127 as the nearest integers, ties to even; returns their sum.
[[gnu::always_inline]] inline int32_t store_int8(F32x16 x, int8_t* to) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

// Stores lanes within +-32767 as the nearest integers, ties to even.
[[gnu::always_inline]] inline void store_int16(F32x16 x, int16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

[[gnu::always_inline]] inline __m512 vexp(__m512 x) {
  return simd::exp(F32x16{x}).v;
}
[[gnu::always_inline]] inline __m512 vtanh(__m512 x) {
  return simd::tanh(F32x16{x}).v;
}
[[gnu::always_inline]] inline __m512 vsilu(__m512 x) {
  return simd::silu(F32x16{x}).v;
}
[[gnu::always_inline]] inline __m512 vgelu_tanh(__m512 x) {
  return simd::gelu_tanh(F32x16{x}).v;
}

}  // namespace
}  // namespace effinfer::cpu::avx512
