// Lines of K and V pages as vectors of floats (see ops/kv_layout.h).
#pragma once

#include <cstdint>

#include "cpu/vectors/math_avx512.h"

namespace effinfer::cpu::avx512 {
namespace {

// Rows x lines of accumulators, the lines' vectors and a broadcast: 6 x 4 + 4 + 1 of 32 registers.
struct KvRegisters {
  using V = F32x16;
  static constexpr bool kScaled = false;
  static constexpr bool kPairs = false;
  static constexpr int wide(int) { return 4; }
};

struct KvF32 : KvRegisters {
  static constexpr int P = 1;
  [[gnu::always_inline]] static void expand(const uint8_t* line, V (&out)[1]) {
    out[0].v = _mm512_loadu_ps(line);
  }
};

struct KvBf16 : KvRegisters {
  static constexpr int P = 2;
  [[gnu::always_inline]] static void expand(const uint8_t* line, V (&out)[2]) {
    const __m512i x = _mm512_loadu_si512(line);
    out[0].v = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    out[1].v = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536)));
  }
};

struct KvF16 : KvRegisters {
  static constexpr int P = 2;
  [[gnu::always_inline]] static void expand(const uint8_t* line, V (&out)[2]) {
    // Even halves to the low 8 bytes of each 16, odd ones to the high; then the quarters together.
    const __m512i split =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m512i gather = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i x =
        _mm512_permutexvar_epi64(gather, _mm512_shuffle_epi8(_mm512_loadu_si512(line), split));
    out[0].v = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
    out[1].v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
  }
};

struct KvI8 : KvRegisters {
  static constexpr int P = 4;
  static constexpr bool kScaled = true;
  static constexpr int wide(int rows) { return rows > 4 ? 2 : 4; }
  [[gnu::always_inline]] static void expand(const uint8_t* line, V (&out)[4]) {
    const __m512i x = _mm512_loadu_si512(line);
    out[0].v = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24));
    out[1].v = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 16), 24));
    out[2].v = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 8), 24));
    out[3].v = _mm512_cvtepi32_ps(_mm512_srai_epi32(x, 24));
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx512
