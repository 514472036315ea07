#include "cpu/merge_states.h"
#include "cpu/simd/math_avx2.h"
#include "cpu/simd/merge_states_body.h"

namespace effinfer::cpu::avx2 {
namespace {

struct Halves {
  [[gnu::always_inline]] static __m128i load8(const uint16_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  [[gnu::always_inline]] static void store8(__m128i x, uint16_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x);
  }
  [[gnu::always_inline]] static __m256 widen(const uint16_t* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load8(from)), 16));
  }
  // To nearest even; NaNs stay NaNs.
  [[gnu::always_inline]] static __m256i narrow(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i kept = _mm256_castps_si256(
        _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan));
    return _mm256_srli_epi32(kept, 16);
  }

  [[gnu::always_inline]] static F32x16 load_f16(const uint16_t* from) {
    return {{_mm256_cvtph_ps(load8(from))}, {_mm256_cvtph_ps(load8(from + 8))}};
  }
  [[gnu::always_inline]] static void store_f16(F32x16 x, uint16_t* to) {
    store8(_mm256_cvtps_ph(x.low.v, _MM_FROUND_TO_NEAREST_INT), to);
    store8(_mm256_cvtps_ph(x.high.v, _MM_FROUND_TO_NEAREST_INT), to + 8);
  }
  [[gnu::always_inline]] static F32x16 load_bf16(const uint16_t* from) {
    return {{widen(from)}, {widen(from + 8)}};
  }
  [[gnu::always_inline]] static void store_bf16(F32x16 x, uint16_t* to) {
    const __m256i words = _mm256_packus_epi32(narrow(x.low.v), narrow(x.high.v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(words, 0xd8));
  }
};

}  // namespace

void merge_states(const kernels::MergeStatesProblem& problem, Team& team) {
  MergeStatesBody<F32x16, Halves>::run(problem, team);
}

}  // namespace effinfer::cpu::avx2
