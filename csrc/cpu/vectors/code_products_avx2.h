// Products of 16-bit integers and the codes of a page (ops/coded_pages.h): VPMADDWD of half a line
// and a broadcast pair.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/vectors/unroll.h"

namespace effinfer::cpu::avx2 {
namespace {

// Rows x 4 lines of accumulators, a row of codes, a line, a product: 3 x 4 + 3 of 16 registers.
constexpr int kMostCodeRows = 3;

// sums[R][16 N] = a[R][depth] times rows of codes whose pairs have N lines; sums are exact before
// they become floats. What lies `ahead` bytes behind the codes is fetched meanwhile.
template <int kBits, int N, int R>
void multiply_codes(const int16_t* a, int64_t a_stride, const uint8_t* codes, int64_t num_rows,
                    int64_t ahead, float* sums) {
  constexpr int kRowLines = 16 / kBits;
  const __m256i mask = _mm256_set1_epi16((1 << kBits) - 1);
  for (int half = 0; half < 2; ++half) {
    __m256i totals[R][N];
    for (auto& row : totals) {
      for (__m256i& total : row) total = _mm256_setzero_si256();
    }
    const uint8_t* from = codes + half * 32;
    const int16_t* pairs = a;
    for (int64_t row = 0; row < num_rows; ++row, from += 64) {
      if (half == 0) __builtin_prefetch(from + ahead, 0, 2);
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      unroll<kRowLines / N>([&](auto pair) __attribute__((always_inline)) {
        unroll<N>([&](auto n) __attribute__((always_inline)) {
          constexpr int kLine = pair * N + n;
          __m256i line = words;
          if constexpr (kLine > 0) line = _mm256_srli_epi16(line, kLine * kBits);
          if constexpr (kLine < kRowLines - 1) line = _mm256_and_si256(line, mask);
          unroll<R>([&](auto r) __attribute__((always_inline)) {
            const __m256i both = _mm256_castps_si256(
                _mm256_broadcast_ss(reinterpret_cast<const float*>(pairs + r * a_stride)));
            totals[r][n] = _mm256_add_epi32(totals[r][n], _mm256_madd_epi16(line, both));
          });
        });
        pairs += 2;
      });
    }
    unroll<R * N>([&](auto i) __attribute__((always_inline)) {
      _mm256_storeu_ps(sums + i * 16 + half * 8, _mm256_cvtepi32_ps(totals[i / N][i % N]));
    });
  }
}

}  // namespace
}  // namespace effinfer::cpu::avx2
