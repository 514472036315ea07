// Comparing and picking lanes, for AVX-512 files.
#pragma once

#include <cstdint>

#include "cpu/vectors/math_avx512.h"

namespace effinfer::cpu::avx512 {
namespace {

// Bit i tells of lane i.
[[gnu::always_inline]] inline uint32_t bits_above(F32x16 a, F32x16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ);
}
[[gnu::always_inline]] inline uint32_t bits_from(F32x16 a, F32x16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
}
[[gnu::always_inline]] inline uint32_t bits_nan(F32x16 a) {
  return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
}
// `value` in the lanes where a > b, else 0.
[[gnu::always_inline]] inline F32x16 where_above(F32x16 a, F32x16 b, F32x16 value) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), value.v)};
}
// Stores the lanes whose bits are set side by side; may write 16 lanes.
[[gnu::always_inline]] inline void compress(F32x16 x, uint32_t bits, float* to) {
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), x.v));
}
// Stores the lanes whose bits are set side by side, and their ids; may write 16 of each.
[[gnu::always_inline]] inline void compress(F32x16 x, const int32_t* ids, uint32_t bits, float* to,
                                            int32_t* to_ids) {
  compress(x, bits, to);
  _mm512_storeu_si512(
      to_ids, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), _mm512_loadu_si512(ids)));
}
// Stores the lanes whose bits are set side by side, and ids, first + i of lane i; may write 16.
[[gnu::always_inline]] inline void compress(F32x16 x, int32_t first, uint32_t bits, float* to,
                                            int32_t* to_ids) {
  compress(x, bits, to);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i ids = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
  _mm512_storeu_si512(to_ids, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), ids));
}

// Sums of each lane in double precision.
struct LaneSums {
  __m512d low;
  __m512d high;

  [[gnu::always_inline]] void add(F32x16 x) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
  }
  [[gnu::always_inline]] void store(double* to) const {
    _mm512_storeu_pd(to, low);
    _mm512_storeu_pd(to + 8, high);
  }
};
[[gnu::always_inline]] inline LaneSums no_sums(F32x16) {
  return {_mm512_setzero_pd(), _mm512_setzero_pd()};
}

}  // namespace
}  // namespace effinfer::cpu::avx512
