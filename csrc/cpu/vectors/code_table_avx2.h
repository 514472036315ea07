// Codes of a page into lines of bfloat16 (ops/coded_pages.h): bytes are looked up, the lower and
// the upper ones of words apart, half a line at a time.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ops/coded_pages.h"

namespace effinfer::cpu::avx2 {
namespace {

// What codes of a range stand for.
class CodeTable {
 public:
  [[gnu::always_inline]] explicit CodeTable(const ops::CodeRange& range) {
    const __m128 numbers = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&range)));
    even_ = bytes(broadcast<0>(numbers), broadcast<1>(numbers));
    odd_ = bytes(broadcast<2>(numbers), broadcast<3>(numbers));
  }

  // Line kLine of a row.
  template <int kBits, int kLine>
  [[gnu::always_inline]] void decode(const uint8_t* row, uint8_t* line) const {
    for (int half = 0; half < 64; half += 32) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + half));
      const __m256i codes = _mm256_and_si256(_mm256_srli_epi16(x, kLine * kBits),
                                             _mm256_set1_epi16((1 << kBits) - 1));
      // An index with the highest bit gives 0.
      const __m256i low = _mm256_or_si256(codes, _mm256_set1_epi16(INT16_MIN));
      const __m256i high = _mm256_or_si256(_mm256_slli_epi16(codes, 8), _mm256_set1_epi16(0x80));
      const __m256i words = _mm256_blend_epi16(even_.at(low, high), odd_.at(low, high), 0xaa);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(line + half), words);
    }
  }

 private:
  // Of 16 words, in both halves.
  struct Bytes {
    __m256i low;
    __m256i high;

    [[gnu::always_inline]] __m256i at(__m256i low_index, __m256i high_index) const {
      return _mm256_or_si256(_mm256_shuffle_epi8(low, low_index),
                             _mm256_shuffle_epi8(high, high_index));
    }
  };

  template <int kLane>
  [[gnu::always_inline]] static __m256 broadcast(__m128 x) {
    return _mm256_broadcastss_ps(_mm_shuffle_ps(x, x, kLane));
  }
  // Eight values in dwords, rounded as f32_to_bf16 does; there are no NaNs.
  [[gnu::always_inline]] static __m256i values(__m256 least, __m256 step, __m256 codes) {
    const __m256i bits = _mm256_castps_si256(_mm256_fmadd_ps(step, codes, least));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  }
  [[gnu::always_inline]] static Bytes bytes(__m256 least, __m256 step) {
    const __m256i first = values(least, step, _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i second = values(least, step, _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15));
    // Packing goes by halves: quarters 0 and 2 are the first eight, 1 and 3 the second.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
    return {both(_mm256_and_si256(words, _mm256_set1_epi16(0xff))),
            both(_mm256_srli_epi16(words, 8))};
  }
  // The 16 bytes of 16 words, twice.
  [[gnu::always_inline]] static __m256i both(__m256i words) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x88);
  }

  Bytes even_;
  Bytes odd_;
};

}  // namespace
}  // namespace effinfer::cpu::avx2
