// Int8 matmul for AVX2: VPMADDUBSW multiplies half a line (8 rows x 4 k, unsigned) by a broadcast
// dword of activations (signed) and adds pairs of products into int16, saturating. Since
// activations are within +-127, sums of int16 stay exact for so many lines:
//
//   u4   2 * 15 * 127 =  3810 a line, 8 lines  30480
//   u5   2 * 31 * 127 =  7874 a line, 4 lines  31496
//   u6   2 * 63 * 127 = 16002 a line, 2 lines  32004      all <= 32767
//
// and are then added in pairs into int32. Bytes would saturate at once (2 * 255 * 127 = 64770), so
// u8 quants are taken as signed w = q - 128, and |w| <= 128 multiplies the activation with the sign
// of w: 2 * 128 * 127 = 32512 a line, 1 line.
#include "cpu/matmul.h"
#include "cpu/matmul_int8.h"
#include "cpu/simd/packed_avx2.h"

namespace effinfer::cpu::avx2 {
namespace {

using kernels::Int8Row;

// Lines of one block whose products fit in int16.
constexpr int exact_lines(QuantBits bits) {
  return bits == QuantBits::u4 ? 8 : bits == QuantBits::u5 ? 4 : bits == QuantBits::u6 ? 2 : 1;
}

struct Avx2 {
  // 8 int16 sums of 4 tokens x 2 halves leave half of the 16 registers to operands.
  static constexpr int kTokens = 4;

  template <PackedFormat format>
  static void dot(const PackedWeight& weight, int64_t first_group, int groups, const Int8Row* rows,
                  int count, float (*sums)[32]) {
    for (int g = 0; g < groups; ++g) {
      const uint8_t* group = weight.group(first_group + g);
      if (count == 1) {
        dot_group<format, 1>(weight, group, rows, count, sums, g * 16);
      } else if (count == 2) {
        dot_group<format, 2>(weight, group, rows, count, sums, g * 16);
      } else {
        dot_group<format, 4>(weight, group, rows, count, sums, g * 16);
      }
    }
  }

 private:
  // `tokens` rows, of which `count` exist: the missing ones repeat the last and are not stored.
  template <PackedFormat format, int tokens>
  static void dot_group(const PackedWeight& weight, const uint8_t* group, const Int8Row* given,
                        int count, float (*sums)[32], int offset) {
    Int8Row rows[tokens];
    for (int t = 0; t < tokens; ++t) rows[t] = given[t < count ? t : count - 1];
    constexpr int64_t kBytes = kernels::superblock_bytes(format);
    const uint8_t* data = group + kernels::header_bytes(format, weight.cols);
    const int64_t superblocks = kernels::padded_cols(weight.cols) / kernels::kSuperblock;
    __m256 sum[2][tokens];
    for (int t = 0; t < tokens; ++t) sum[0][t] = sum[1][t] = _mm256_setzero_ps();
    for (int64_t s = 0; s < superblocks; ++s, data += kBytes) {
      for (int64_t line = 0; line < kBytes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(data + 4096 + line), _MM_HINT_T0);
      }
      add_superblock<format, tokens>(weight, group, data, s, rows, sum);
    }
    for (int t = 0; t < count; ++t) {
      _mm256_storeu_ps(sums[t] + offset, sum[0][t]);
      _mm256_storeu_ps(sums[t] + offset + 8, sum[1][t]);
    }
  }

  template <PackedFormat format, int tokens>
  [[gnu::always_inline]] static void add_superblock(const PackedWeight& weight,
                                                    const uint8_t* group, const uint8_t* data,
                                                    int64_t s, const Int8Row* rows,
                                                    __m256 (*sum)[tokens]) {
    constexpr int kPhases = 32 / format.sub_block;
    constexpr int kSteps = 8 / kPhases;
    constexpr int kExact = exact_lines(format.bits) < kSteps ? exact_lines(format.bits) : kSteps;
    unroll<2 * kPhases>([&](auto index) __attribute__((always_inline)) {
      constexpr int phase = index / 2;
      constexpr int f = index % 2;
      __m256i integer[2][tokens];
      for (int t = 0; t < tokens; ++t) {
        integer[0][t] = bias<format, phase>(rows[t].sums16 + 4 * s + 2 * f);
        integer[1][t] = integer[0][t];
      }
      unroll<kSteps / kExact>([&](auto stretch) __attribute__((always_inline)) {
        constexpr int first = phase * kSteps + stretch * kExact;
        add_lines<format.bits, f, first, kExact, tokens>(data, s, rows, integer);
      });
      for (int half = 0; half < 2; ++half) {
        finish<format, phase, tokens>(weight, group, data, s, f, half, rows, integer[half],
                                      sum[half]);
      }
    });
  }

  // integer[half] += lines [first, first + lines) of block f: a broadcast of activations serves
  // both halves of a line.
  template <QuantBits bits, int f, int first, int lines, int tokens>
  [[gnu::always_inline]] static void add_lines(const uint8_t* data, int64_t s, const Int8Row* rows,
                                               __m256i (*integer)[tokens]) {
    __m256i pairs[2][tokens];
    unroll<lines>([&](auto step) __attribute__((always_inline)) {
      constexpr int i = first + step;
      __m256i operand[2];
      __m256i magnitude[2];
      for (int half = 0; half < 2; ++half) {
        operand[half] = load_operand<bits, f, i>(data + 32 * half);
        magnitude[half] = operand[half];
        if constexpr (bits == QuantBits::u8) {
          operand[half] = _mm256_xor_si256(operand[half], _mm256_set1_epi8(-128));
          magnitude[half] = _mm256_abs_epi8(operand[half]);
        }
      }
      for (int t = 0; t < tokens; ++t) {
        const __m256i broadcast = broadcast_dword(rows[t].q + 64 * s + 32 * f + 4 * i);
        for (int half = 0; half < 2; ++half) {
          __m256i a = broadcast;
          if constexpr (bits == QuantBits::u8) a = _mm256_sign_epi8(a, operand[half]);
          const __m256i products = _mm256_maddubs_epi16(magnitude[half], a);
          pairs[half][t] = step == 0 ? products : _mm256_add_epi16(pairs[half][t], products);
        }
      }
    });
    for (int half = 0; half < 2; ++half) {
      for (int t = 0; t < tokens; ++t) {
        integer[half][t] = _mm256_add_epi32(
            integer[half][t], _mm256_madd_epi16(pairs[half][t], _mm256_set1_epi16(1)));
      }
    }
  }

  // -zero * the sum of the sub-block's activations; `sums16` are the two halves of its block.
  template <PackedFormat format, int phase>
  [[gnu::always_inline]] static __m256i bias(const int16_t* sums16) {
    if constexpr (format.zero == 0 || format.bits == QuantBits::u8) return _mm256_setzero_si256();
    constexpr uint32_t kZero = static_cast<uint16_t>(-format.zero);
    constexpr uint32_t kFactors = format.sub_block == 32 ? kZero << 16 | kZero
                                  : phase == 0           ? kZero
                                                         : kZero << 16;
    return _mm256_madd_epi16(_mm256_set1_epi32(static_cast<int32_t>(kFactors)),
                             broadcast_dword(sums16));
  }

  template <PackedFormat format, int phase, int tokens>
  [[gnu::always_inline]] static void finish(const PackedWeight& weight, const uint8_t* group,
                                            const uint8_t* data, int64_t s, int f, int half,
                                            const Int8Row* rows, const __m256i* integer,
                                            __m256* sum) {
    const int sub = f * (32 / format.sub_block) + phase;
    const auto [scale, min] = load_affine<format>(weight, group, data, s, sub, half);
    for (int t = 0; t < tokens; ++t) {
      const float activation_scale = rows[t].scales[2 * s + f];
      sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(integer[t]),
                               _mm256_mul_ps(scale, _mm256_set1_ps(activation_scale)), sum[t]);
      if constexpr (format.has_min) {
        const float scaled =
            format.sub_block == 32
                ? rows[t].sums[2 * s + f]
                : activation_scale * static_cast<float>(rows[t].sums16[4 * s + 2 * f + phase]);
        sum[t] = _mm256_fmadd_ps(min, _mm256_set1_ps(scaled), sum[t]);
      }
    }
  }
};

}  // namespace

void matmul_int8(const kernels::MatmulProblem& problem, Team& team) {
  Int8Matmul<Avx2>::run(problem, team);
}

}  // namespace effinfer::cpu::avx2
