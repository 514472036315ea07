// Rows of keys and values into lines (ops/kv_layout.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace effinfer::cpu::avx2 {
namespace {

struct KvPack {
  struct Line {
    alignas(64) uint8_t bytes[64];
  };

  // Line d of 16 dwords: dword d of each row. `dwords` is a multiple of 8.
  static void transpose(const uint8_t* const (&rows)[16], int64_t offset, int64_t dwords,
                        uint8_t* lines) {
    for (int64_t d = 0; d < dwords; d += 8) {
      for (int half = 0; half < 2; ++half) {
        __m256i x[8];
        for (int i = 0; i < 8; ++i) x[i] = load(rows[half * 8 + i] + offset + d * 4);
        transpose_8x8(x);
        for (int i = 0; i < 8; ++i) store(x[i], lines + (d + i) * 64 + half * 32);
      }
    }
  }

  // Pairs of 16-bit numbers of two rows: a0 b0 a1 b1 ... `count` is a multiple of 16.
  static void interleave(const uint8_t* a, const uint8_t* b, int64_t count, uint8_t* lines) {
    for (int64_t i = 0; i < count; i += 16) {
      const __m256i x = load(a + 2 * i);
      const __m256i y = load(b + 2 * i);
      const __m256i low = _mm256_unpacklo_epi16(x, y);
      const __m256i high = _mm256_unpackhi_epi16(x, y);
      store(_mm256_permute2x128_si256(low, high, 0x20), lines + 4 * i);
      store(_mm256_permute2x128_si256(low, high, 0x31), lines + 4 * i + 32);
    }
  }

  // Loads 16 dwords of each row from one offset on (kCount = 8: 8 dwords).
  template <int kCount>
  static void block(const uint8_t* const* rows, int64_t offset, Line (&lines)[16]) {
    const uint8_t* from[16];
    for (int i = 0; i < 16; ++i) from[i] = rows[i];
    transpose(from, offset, kCount, lines[0].bytes);
  }

  // A line of one row's floats, or of pairs of two rows' 16-bit numbers.
  template <int kRows>
  [[gnu::always_inline]] static Line line(const uint8_t* const (&rows)[kRows], int64_t offset) {
    Line line;
    if constexpr (kRows == 1) {
      __builtin_memcpy(line.bytes, rows[0] + offset, 64);
    } else {
      interleave(rows[0] + offset, rows[1] + offset, 16, line.bytes);
    }
    return line;
  }

 private:
  [[gnu::always_inline]] static __m256i load(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  [[gnu::always_inline]] static void store(__m256i x, uint8_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
  }

  [[gnu::always_inline]] static void transpose_8x8(__m256i (&x)[8]) {
    __m256i y[8];
    for (int i = 0; i < 8; i += 2) {
      y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
      y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
      x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
      x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
      x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
      y[c] = _mm256_permute2x128_si256(x[c], x[4 + c], 0x20);
      y[4 + c] = _mm256_permute2x128_si256(x[c], x[4 + c], 0x31);
    }
    for (int i = 0; i < 8; ++i) x[i] = y[i];
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx2
