// Lines of K and V pages as vectors of floats (see ops/kv_layout.h), half a line at a time.
#pragma once

#include <cstdint>

#include "cpu/vectors/math_avx2.h"

namespace effinfer::cpu::avx2 {
namespace {

// Rows x lines of accumulators in pairs, one line's pair and a broadcast: 6 x 2 + 2 + 1 of 16
// registers; two lines for few rows, whose chains would not fill the multipliers.
struct KvRegisters {
  using V = F32x16;
  static constexpr bool kScaled = false;
  static constexpr bool kPairs = false;
  static constexpr int wide(int rows) { return rows <= 2 ? 2 : 1; }
};

struct KvF32 : KvRegisters {
  static constexpr int P = 1;
  [[gnu::always_inline]] static void expand(const uint8_t* line, V (&out)[1]) {
    out[0].low.v = _mm256_loadu_ps(reinterpret_cast<const float*>(line));
    out[0].high.v = _mm256_loadu_ps(reinterpret_cast<const float*>(line + 32));
  }
};

[[gnu::always_inline]] inline __m256i load_half(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

struct KvBf16 : KvRegisters {
  static constexpr int P = 2;
  [[gnu::always_inline]] static void expand(const uint8_t* line, V (&out)[2]) {
    const __m256i low = load_half(line), high = load_half(line + 32);
    const __m256i mask = _mm256_set1_epi32(-65536);
    out[0].low.v = _mm256_castsi256_ps(_mm256_slli_epi32(low, 16));
    out[0].high.v = _mm256_castsi256_ps(_mm256_slli_epi32(high, 16));
    out[1].low.v = _mm256_castsi256_ps(_mm256_and_si256(low, mask));
    out[1].high.v = _mm256_castsi256_ps(_mm256_and_si256(high, mask));
  }
};

struct KvF16 : KvRegisters {
  static constexpr int P = 2;
  [[gnu::always_inline]] static void split(__m256i x, F32x8& even, F32x8& odd) {
    // Even halves to the low 8 bytes of each 16, odd ones to the high; then the quarters together.
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    x = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x, order), 0xd8);
    even.v = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
    odd.v = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
  }
  [[gnu::always_inline]] static void expand(const uint8_t* line, V (&out)[2]) {
    split(load_half(line), out[0].low, out[1].low);
    split(load_half(line + 32), out[0].high, out[1].high);
  }
};

struct KvI8 : KvRegisters {
  static constexpr int P = 4;
  static constexpr bool kScaled = true;
  template <int kByte>
  [[gnu::always_inline]] static __m256 widen(__m256i x) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * kByte), 24));
  }
  [[gnu::always_inline]] static void expand(const uint8_t* line, V (&out)[4]) {
    const __m256i low = load_half(line), high = load_half(line + 32);
    out[0] = {{widen<0>(low)}, {widen<0>(high)}};
    out[1] = {{widen<1>(low)}, {widen<1>(high)}};
    out[2] = {{widen<2>(low)}, {widen<2>(high)}};
    out[3] = {{widen<3>(low)}, {widen<3>(high)}};
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx2
