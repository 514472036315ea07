#include "cpu/merge_states.h"
#include "cpu/simd/math_avx512.h"
#include "cpu/simd/merge_states_body.h"

namespace effinfer::cpu::avx512 {
namespace {

struct Halves {
  [[gnu::always_inline]] static __m256i load16(const uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  [[gnu::always_inline]] static void store16(__m256i x, uint16_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
  }

  [[gnu::always_inline]] static F32x16 load_f16(const uint16_t* from) {
    return {_mm512_cvtph_ps(load16(from))};
  }
  [[gnu::always_inline]] static void store_f16(F32x16 x, uint16_t* to) {
    store16(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT), to);
  }
  [[gnu::always_inline]] static F32x16 load_bf16(const uint16_t* from) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load16(from)), 16))};
  }
  // To nearest even; NaNs stay NaNs.
  [[gnu::always_inline]] static void store_bf16(F32x16 x, uint16_t* to) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    store16(_mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)), to);
  }
};

}  // namespace

void merge_states(const kernels::MergeStatesProblem& problem, Team& team) {
  MergeStatesBody<F32x16, Halves>::run(problem, team);
}

}  // namespace effinfer::cpu::avx512
