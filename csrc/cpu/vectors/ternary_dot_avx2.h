// Ternary matmul for AVX2: VPMADDUBSW multiplies half a line (8 rows x 4 k of digits) by a
// broadcast dword of activations and adds pairs into int16. With |q| <= 127 and digits up to 2 a
// product of a line is at most 2 * 2 * 127 = 508, so that
//
//   digits                  64 lines, a block of 256 k   32512 <= 32767
//   4 x digits, in place    16 fields, 8 lines of t2     32512
//
// stay exact in int16 before they are widened.
#pragma once

#include "core/tuned.h"
#include "cpu/matmul_units.h"
#include "cpu/vectors/ternary_avx2.h"

namespace effinfer::cpu::avx2 {
namespace {

struct TernaryDot {
  const int t2_lines = line_rows(PackedTernary::t2, kTernaryTokens);
  const int t1_6_lines = line_rows(PackedTernary::t1_6, 4);

  static constexpr int kTokens = 4;  // 8 int16 sums of two halves of a line
  static constexpr bool kWholeTiles = false;
  // Digits of t2 cost so little that unpacking them anew for every four tokens is no slower than
  // panels are; those of t1_6 cost ten operations.
  template <QuantBits bits>
  int line_tokens() const {
    return bits == QuantBits::t2 ? t2_lines : t1_6_lines;
  }
  static constexpr int kLineTile = 4;

  template <QuantBits bits>
  void dot(const uint8_t* lines, int64_t first, int64_t last, const TernaryBlocks& blocks,
           const int8_t* q, int64_t stride, int tokens, const FetchAhead& ahead,
           int32_t* sums) const {
    if constexpr (bits == QuantBits::t2) {
      if (tokens == 1) return dot_one(lines, first, last, blocks, q, ahead, sums);
    }
    unroll<kLineTile>([&](auto index) __attribute__((always_inline)) {
      if (tokens != index + 1) return;
      dot_tile<bits, index + 1>(lines, first, last, blocks, q, stride, ahead, sums);
    });
  }

  template <QuantBits bits>
  static void decode(const uint8_t* lines, int dwords, uint8_t* panel) {
    decode_panel<bits>(lines, dwords, panel);
  }

  static void multiply(const uint8_t* const* panels, int dwords, const int8_t* q, int64_t stride,
                       int tokens, int32_t (*sums)[32]) {
    unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
      if (tokens != index + 1) return;
      for (int g = 0; g < 2; ++g) {
        multiply_tile<index + 1>(panels[g], dwords, q, stride, sums, 16 * g);
      }
    });
  }

 private:
  template <QuantBits bits>
  static constexpr int lines_of(int dwords) {
    return static_cast<int>(ops::ternary_lines(bits, dwords));
  }

  template <class T>
  [[gnu::always_inline]] static void store(T* to, __m256i value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
  }

  // Adds where it is written: GCC would add products up as trees, for which the registers are too
  // few, and copy every sum in each round.
  [[gnu::always_inline]] static void add_products(__m256i& sum, __m256i digits, __m256i value) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(digits, value));
    __asm__("" : "+x"(sum));
  }

  // Adds the pairs of int16 of each row.
  [[gnu::always_inline]] static __m256i widen(__m256i sums) {
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
  }

  // Calls body(lines, q, count) for each block; the count of whole blocks is a constant.
  template <QuantBits bits, class Body>
  [[gnu::always_inline]] static void for_blocks(const uint8_t* lines, int64_t first, int64_t last,
                                                const TernaryBlocks& blocks, const int8_t* q,
                                                Body&& body) {
    for (int64_t b = first; b < last; ++b) {
      const uint8_t* data = lines + b * ternary_block_bytes(bits);
      const int8_t* a = q + b * ops::kTernaryBlock;
      const int dwords = blocks.dwords_of(b);
      if (dwords == kPanelDwords) {
        body(data, a, std::integral_constant<int, lines_of<bits>(kPanelDwords)>());
      } else {
        body(data, a, lines_of<bits>(dwords));
      }
    }
  }

  static void dot_one(const uint8_t* lines, int64_t first, int64_t last,
                      const TernaryBlocks& blocks, const int8_t* q, const FetchAhead& ahead,
                      int32_t* sums) {
    __m256i total[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for_blocks<QuantBits::t2>(
        lines, first, last, blocks, q,
        [&](const uint8_t* data, const int8_t* a, auto count) __attribute__((always_inline)) {
          __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
          add_lines(data, a, count, ahead, sum);
          for (int h = 0; h < 2; ++h) total[h] = _mm256_add_epi32(total[h], widen(sum[h]));
        });
    for (int h = 0; h < 2; ++h) store(sums + 8 * h, total[h]);
  }

  // The digits of a line, in registers, times all tokens.
  template <QuantBits bits, int tokens>
  static void dot_tile(const uint8_t* lines, int64_t first, int64_t last,
                       const TernaryBlocks& blocks, const int8_t* q, int64_t stride,
                       const FetchAhead& ahead, int32_t* sums) {
    __m256i total[tokens][2];
    for (int t = 0; t < tokens; ++t) total[t][0] = total[t][1] = _mm256_setzero_si256();
    for_blocks<bits>(
        lines, first, last, blocks, q,
        [&](const uint8_t* data, const int8_t* a, auto count) __attribute__((always_inline)) {
          __m256i sum[tokens][2];
          for (int t = 0; t < tokens; ++t) sum[t][0] = sum[t][1] = _mm256_setzero_si256();
          for (int i = 0; i < count; ++i) {
            ahead.ask_for_line(data + i * 64);
            Digits<bits> lower(load(data + i * 64));
            Digits<bits> upper(load(data + i * 64 + 32));
            unroll<kFields<bits>>([&](auto f) __attribute__((always_inline)) {
              const __m256i digits[2] = {lower.field(f), upper.field(f)};
              for (int t = 0; t < tokens; ++t) {
                const __m256i value = broadcast_dword(a + t * stride + 4 * (f * count + i));
                for (int h = 0; h < 2; ++h) add_products(sum[t][h], digits[h], value);
              }
            });
          }
          for (int t = 0; t < tokens; ++t) {
            for (int h = 0; h < 2; ++h) {
              total[t][h] = _mm256_add_epi32(total[t][h], widen(sum[t][h]));
            }
          }
        });
    for (int t = 0; t < tokens; ++t) {
      for (int h = 0; h < 2; ++h) store(sums + t * kUnitOutputs + 8 * h, total[t][h]);
    }
  }

  // Lines of t2: fields 0 and 2 as digits, fields 1 and 3 as 4 times digits.
  template <class Count>
  [[gnu::always_inline]] static void add_lines(const uint8_t* lines, const int8_t* a, Count count,
                                               const FetchAhead& ahead, __m256i* sum) {
    for (int begin = 0; begin < count; begin += 8) {
      const int end = begin + 8 < count ? begin + 8 : count;
      __m256i fourfold[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
      for (int i = begin; i < end; ++i) {
        ahead.ask_for_line(lines + i * 64);
        __m256i value[4];
        for (int f = 0; f < 4; ++f) value[f] = broadcast_dword(a + 4 * (f * count + i));
        for (int h = 0; h < 2; ++h) {
          const __m256i line = load(lines + i * 64 + h * 32);
          const __m256i upper = _mm256_srli_epi16(line, 4);
          sum[h] = add_field<3>(sum[h], line, value[0]);
          fourfold[h] = add_field<12>(fourfold[h], line, value[1]);
          sum[h] = add_field<3>(sum[h], upper, value[2]);
          fourfold[h] = add_field<12>(fourfold[h], upper, value[3]);
        }
      }
      for (int h = 0; h < 2; ++h) {
        sum[h] = _mm256_add_epi16(sum[h], _mm256_srai_epi16(fourfold[h], 2));
      }
    }
  }

  template <int mask>
  [[gnu::always_inline]] static __m256i add_field(__m256i sum, __m256i line, __m256i value) {
    const __m256i digits = _mm256_and_si256(line, _mm256_set1_epi8(mask));
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(digits, value));
  }

  template <int tokens>
  static void multiply_tile(const uint8_t* panel, int dwords, const int8_t* q, int64_t stride,
                            int32_t (*sums)[32], int offset) {
    __m256i sum[tokens][2];
    for (int t = 0; t < tokens; ++t) sum[t][0] = sum[t][1] = _mm256_setzero_si256();
    for (int n = 0; n < dwords; ++n) {
      const __m256i w0 = load(panel + n * 64);
      const __m256i w1 = load(panel + n * 64 + 32);
      for (int t = 0; t < tokens; ++t) {
        const __m256i value = broadcast_dword(q + t * stride + 4 * n);
        add_products(sum[t][0], w0, value);
        add_products(sum[t][1], w1, value);
      }
    }
    for (int t = 0; t < tokens; ++t) {
      for (int h = 0; h < 2; ++h) {
        int32_t* to = sums[t] + offset + 8 * h;
        const __m256i old = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(to));
        store(to, _mm256_add_epi32(old, widen(sum[t][h])));
      }
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx2
