// Codes of a page into lines of bfloat16 (ops/coded_pages.h): 32 words are looked up at once.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ops/coded_pages.h"

namespace effinfer::cpu::avx512 {
namespace {

// What codes of a range stand for: words 0 to 15 of even words, 16 to 31 of odd ones.
class CodeTable {
 public:
  [[gnu::always_inline]] explicit CodeTable(const ops::CodeRange& range) {
    const __m128 numbers = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&range)));
    const __m256i even =
        values(_mm512_broadcastss_ps(numbers), _mm512_broadcastss_ps(lane<1>(numbers)));
    const __m256i odd =
        values(_mm512_broadcastss_ps(lane<2>(numbers)), _mm512_broadcastss_ps(lane<3>(numbers)));
    table_ = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
  }

  // Line kLine of a row. Of an index the lowest 5 bits count: 4 of a code, then the word's parity.
  template <int kBits, int kLine>
  [[gnu::always_inline]] void decode(const uint8_t* row, uint8_t* line) const {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    const __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(row), kLine * kBits);
    const __m512i index = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi16((1 << kBits) - 1),
                                                    _mm512_set1_epi32(16 << 16), kAndOr);
    _mm512_storeu_si512(line, _mm512_permutexvar_epi16(index, table_));
  }

 private:
  template <int kLane>
  [[gnu::always_inline]] static __m128 lane(__m128 x) {
    return _mm_shuffle_ps(x, x, kLane);
  }
  // Rounded as f32_to_bf16 does; there are no NaNs.
  [[gnu::always_inline]] static __m256i values(__m512 least, __m512 step) {
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i bits = _mm512_castps_si512(_mm512_fmadd_ps(step, codes, least));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(bits, half), 16));
  }

  __m512i table_;
};

}  // namespace
}  // namespace effinfer::cpu::avx512
