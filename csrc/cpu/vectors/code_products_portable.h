// Products of 16-bit integers and the codes of a page (ops/coded_pages.h), code by code.
#pragma once

#include <cstdint>
#include <cstring>

namespace effinfer::cpu::portable {
namespace {

constexpr int kMostCodeRows = 4;

// sums[R][16 N] = a[R][depth] times rows of codes whose pairs have N lines; sums are exact before
// they become floats. What lies `ahead` bytes behind the codes is fetched meanwhile.
template <int kBits, int N, int R>
void multiply_codes(const int16_t* a, int64_t a_stride, const uint8_t* codes, int64_t num_rows,
                    int64_t, float* sums) {
  constexpr int kRowLines = 16 / kBits;
  int32_t totals[R][16 * N] = {};
  for (int64_t row = 0; row < num_rows; ++row, codes += 64, a += 2 * kRowLines / N) {
    uint16_t words[32];
    std::memcpy(words, codes, sizeof(words));
    for (int line = 0; line < kRowLines; ++line) {
      const int16_t* pair = a + line / N * 2;
      for (int i = 0; i < 32; ++i) {
        const int32_t code = words[i] >> line * kBits & ((1 << kBits) - 1);
        for (int r = 0; r < R; ++r) {
          totals[r][line % N * 16 + i / 2] += code * pair[r * a_stride + i % 2];
        }
      }
    }
  }
  for (int i = 0; i < R * 16 * N; ++i)
    sums[i] = static_cast<float>(totals[i / (16 * N)][i % (16 * N)]);
}

}  // namespace
}  // namespace effinfer::cpu::portable
