// Rows of keys and values into lines (ops/kv_layout.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace effinfer::cpu::avx512 {
namespace {

struct KvPack {
  using Line = __m512i;

  // Line d of 16 dwords: dword d of each row. `dwords` is a multiple of 8.
  static void transpose(const uint8_t* const (&rows)[16], int64_t offset, int64_t dwords,
                        uint8_t* lines) {
    for (int64_t d = 0; d < dwords; d += 16) {
      const auto mask = static_cast<__mmask16>(dwords - d >= 16 ? 0xffff : 0xff);
      __m512i x[16];
      for (int i = 0; i < 16; ++i) {
        x[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + offset + d * 4);
      }
      transpose_16x16(x);
      const int count = mask == 0xffff ? 16 : 8;
      for (int i = 0; i < count; ++i) _mm512_storeu_si512(lines + (d + i) * 64, x[i]);
    }
  }

  // Loads 16 dwords of each row from one offset on (kCount = 8: 8 dwords) into registers.
  template <int kCount>
  [[gnu::always_inline]] static void block(const uint8_t* const* rows, int64_t offset,
                                           Line (&lines)[16]) {
    constexpr auto kMask = static_cast<__mmask16>(kCount == 16 ? 0xffff : 0xff);
    for (int i = 0; i < 16; ++i) lines[i] = _mm512_maskz_loadu_epi32(kMask, rows[i] + offset);
    transpose_16x16(lines);
  }

  // A line of one row's floats, or of pairs of two rows' 16-bit numbers.
  template <int kRows>
  [[gnu::always_inline]] static Line line(const uint8_t* const (&rows)[kRows], int64_t offset) {
    if constexpr (kRows == 1) {
      return _mm512_loadu_si512(rows[0] + offset);
    } else {
      return pair(rows[0] + offset, rows[1] + offset);
    }
  }

  // Pairs of 16-bit numbers of two rows: a0 b0 a1 b1 ... `count` is a multiple of 16.
  static void interleave(const uint8_t* a, const uint8_t* b, int64_t count, uint8_t* lines) {
    for (int64_t i = 0; i < count; i += 16) {
      _mm512_storeu_si512(lines + 4 * i, pair(a + 2 * i, b + 2 * i));
    }
  }

 private:
  [[gnu::always_inline]] static __m256i load(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  [[gnu::always_inline]] static __m512i pair(const uint8_t* a, const uint8_t* b) {
    const __m512i low = _mm512_cvtepu16_epi32(load(a));
    const __m512i high = _mm512_cvtepu16_epi32(load(b));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }

  // Takes four steps: pairs of dwords, of quads within 128 bits, then of 128-bit quarters twice.
  [[gnu::always_inline]] static void transpose_16x16(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
      y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
      y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
      x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
      x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
      x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    // x[4 r + c] holds dwords c, c + 4, c + 8, c + 12 of rows 4 r .. 4 r + 3, a quarter each.
    for (int c = 0; c < 4; ++c) {
      const __m512i low01 = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x44);
      const __m512i high01 = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xee);
      const __m512i low23 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x44);
      const __m512i high23 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xee);
      y[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
      y[4 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
      y[8 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
      y[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
    }
    for (int i = 0; i < 16; ++i) x[i] = y[i];
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx512
