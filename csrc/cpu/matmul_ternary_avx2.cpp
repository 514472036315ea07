// Ternary matmul for AVX2: VPMADDUBSW multiplies half a line (8 rows x 4 k of digits) by a
// broadcast dword of activations and adds pairs into int16. With |q| <= 127 and digits up to 2 a
// product of a line is at most 2 * 2 * 127 = 508, so that
//
//   digits                  64 lines, a block of 256 k   32512 <= 32767
//   4 x digits, in place    16 fields, 8 lines of t2     32512
//
// stay exact in int16 before they are widened.
#include "cpu/matmul.h"
#include "cpu/matmul_ternary.h"
#include "cpu/simd/math_avx2.h"
#include "cpu/simd/packed_avx2.h"

namespace effinfer::cpu::avx2 {
namespace {

struct Avx2 {
  using Vector = F32x16;
  static constexpr int kTokens = 4;  // 8 int16 sums of two halves of a line
  static constexpr int kLineTokens = 1;

  template <QuantBits bits>
  static void dot(const uint8_t* lines, int64_t first, int64_t last, const TernaryBlocks& blocks,
                  const int8_t* q, int32_t* sums) {
    __m256i total[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int64_t b = first; b < last; ++b) {
      const uint8_t* data = lines + b * ternary_block_bytes(bits);
      const int8_t* a = q + b * kernels::kTernaryBlock;
      const int dwords = blocks.dwords_of(b);
      __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
      if constexpr (bits == QuantBits::t2) {
        if (dwords == kPanelDwords) {
          add_lines(data, a, std::integral_constant<int, kPanelDwords / 4>(), sum);
        } else {
          add_lines(data, a, dwords / 4, sum);
        }
      } else {
        alignas(32) uint8_t panel[kPanelBytes];
        decode<bits>(data, dwords, panel);
        prefetch(data, ternary_block_bytes(bits));
        for (int n = 0; n < dwords; ++n) add_line(panel + n * 64, a + 4 * n, sum);
      }
      for (int h = 0; h < 2; ++h) total[h] = _mm256_add_epi32(total[h], widen(sum[h]));
    }
    for (int h = 0; h < 2; ++h) store(sums + 8 * h, total[h]);
  }

  template <QuantBits bits>
  static void decode(const uint8_t* lines, int dwords, uint8_t* panel) {
    const int count = static_cast<int>(kernels::ternary_lines(bits, dwords));
    const auto put = [&](int line, int half, __m256i digits) __attribute__((always_inline)) {
      if (line < dwords) store(panel + line * 64 + half * 32, digits);
    };
    for (int i = 0; i < 2 * count; ++i) {
      const __m256i line = load(lines + i * 32);
      const int half = i % 2;
      if constexpr (bits == QuantBits::t2) {
        unroll<4>([&](auto f) __attribute__((always_inline)) {
          put(f * count + i / 2, half,
              _mm256_and_si256(_mm256_srli_epi16(line, 2 * f), _mm256_set1_epi8(3)));
        });
      } else {
        const __m256i low = _mm256_set1_epi16(255);
        __m256i even = _mm256_and_si256(line, low);
        __m256i odd = _mm256_srli_epi16(line, 8);
        unroll<5>([&](auto f) __attribute__((always_inline)) {
          even = _mm256_mullo_epi16(even, _mm256_set1_epi16(3));
          odd = _mm256_mullo_epi16(odd, _mm256_set1_epi16(3));
          put(f * count + i / 2, half,
              _mm256_or_si256(_mm256_srli_epi16(even, 8), _mm256_andnot_si256(low, odd)));
          even = _mm256_and_si256(even, low);
          odd = _mm256_and_si256(odd, low);
        });
      }
    }
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
  template <class T>
  [[gnu::always_inline]] static void store(T* to, __m256i value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
  }

  [[gnu::always_inline]] static void prefetch(const uint8_t* data, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(data + 1024 + line), _MM_HINT_T0);
    }
  }

  // Pairs of int16 of a row, added.
  [[gnu::always_inline]] static __m256i widen(__m256i sums) {
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
  }

  [[gnu::always_inline]] static void add_line(const uint8_t* line, const int8_t* a, __m256i* sum) {
    const __m256i value = broadcast_dword(a);
    for (int h = 0; h < 2; ++h) {
      sum[h] = _mm256_add_epi16(sum[h], _mm256_maddubs_epi16(load(line + 32 * h), value));
    }
  }

  // Lines of t2: fields 0 and 2 as digits, fields 1 and 3 as 4 times digits.
  template <class Count>
  [[gnu::always_inline]] static void add_lines(const uint8_t* lines, const int8_t* a, Count count,
                                               __m256i* sum) {
    for (int begin = 0; begin < count; begin += 8) {
      const int end = begin + 8 < count ? begin + 8 : count;
      __m256i fourfold[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
      for (int i = begin; i < end; ++i) {
        prefetch(lines + i * 64, 64);
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
        sum[t][0] = _mm256_add_epi16(sum[t][0], _mm256_maddubs_epi16(w0, value));
        sum[t][1] = _mm256_add_epi16(sum[t][1], _mm256_maddubs_epi16(w1, value));
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

void matmul_ternary(const kernels::MatmulProblem& problem, Team& team) {
  TernaryMatmul<Avx2>::run(problem, team);
}

}  // namespace effinfer::cpu::avx2
