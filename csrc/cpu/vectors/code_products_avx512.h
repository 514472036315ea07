// Products of 16-bit integers and the codes of a page (ops/coded_pages.h): VPDPWSSD of a line and a
// broadcast pair.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/vectors/unroll.h"

namespace effinfer::cpu::avx512 {
namespace {

// Rows x 4 lines of accumulators, the rows' pairs, a row of codes, a line, the mask: 4 x 4 + 7 of
// 32 registers.
constexpr int kMostCodeRows = 4;

// sums[R][16 N] = a[R][depth] times rows of codes whose pairs have N lines; sums are exact before
// they become floats. What lies `ahead` bytes behind the codes is fetched meanwhile.
template <int kBits, int N, int R>
void multiply_codes(const int16_t* a, int64_t a_stride, const uint8_t* codes, int64_t num_rows,
                    int64_t ahead, float* sums) {
  constexpr int kRowLines = 16 / kBits;
  const __m512i mask = _mm512_set1_epi16((1 << kBits) - 1);
  __m512i totals[R][N];
  for (auto& row : totals) {
    for (__m512i& total : row) total = _mm512_setzero_si512();
  }
  for (int64_t row = 0; row < num_rows; ++row, codes += 64) {
    __builtin_prefetch(codes + ahead, 0, 2);
    const __m512i words = _mm512_loadu_si512(codes);
    unroll<kRowLines / N>([&](auto pair) __attribute__((always_inline)) {
      __m512i both[R];
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        int32_t dword;
        std::memcpy(&dword, a + r * a_stride, sizeof(dword));
        both[r] = _mm512_set1_epi32(dword);
      });
      unroll<N>([&](auto n) __attribute__((always_inline)) {
        constexpr int kLine = pair * N + n;
        __m512i line = words;
        if constexpr (kLine > 0) line = _mm512_srli_epi16(line, kLine * kBits);
        if constexpr (kLine < kRowLines - 1) line = _mm512_and_si512(line, mask);
        unroll<R>([&](auto r) __attribute__((always_inline)) {
          totals[r][n] = _mm512_dpwssd_epi32(totals[r][n], line, both[r]);
        });
      });
      a += 2;
    });
  }
  unroll<R * N>([&](auto i) __attribute__((always_inline)) {
    _mm512_storeu_ps(sums + i * 16, _mm512_cvtepi32_ps(totals[i / N][i % N]));
  });
}

}  // namespace
}  // namespace effinfer::cpu::avx512
