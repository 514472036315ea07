// Int8 matmul for AVX-512 VNNI: one VPDPBUSD multiplies a line of 16 rows x 4 k by a broadcast
// dword of activations.
#include "cpu/matmul.h"
#include "cpu/matmul_int8.h"
#include "cpu/simd/packed_avx512.h"

namespace effinfer::cpu::avx512 {
namespace {

using kernels::Int8Row;
using kernels::PackedFormat;
using kernels::PackedWeight;

struct Avx512 {
  static constexpr int kTokens = 8;

  // One group after the other: weights come from memory as one linear stream, which the prefetchers
  // follow better than two side by side, although those share their broadcasts of activations.
  template <PackedFormat format>
  static void dot(const PackedWeight& weight, int64_t first_group, int groups, const Int8Row* rows,
                  int count, float (*sums)[32]) {
    for (int g = 0; g < groups; ++g) {
      const int64_t group = first_group + g;
      const int offset = g * 16;
      switch (count) {
        case 1:
          dot_group<format, 1>(weight, group, rows, count, sums, offset);
          break;
        case 2:
          dot_group<format, 2>(weight, group, rows, count, sums, offset);
          break;
        case 3:
        case 4:
          dot_group<format, 4>(weight, group, rows, count, sums, offset);
          break;
        default:
          dot_group<format, 8>(weight, group, rows, count, sums, offset);
          break;
      }
    }
  }

 private:
  // A group times `tokens` rows, of which `count` exist: the missing ones repeat the last and are
  // not stored.
  template <PackedFormat format, int tokens>
  static void dot_group(const PackedWeight& weight, int64_t index, const Int8Row* rows, int count,
                        float (*sums)[32], int offset) {
    Int8Row row[tokens];
    for (int t = 0; t < tokens; ++t) row[t] = rows[t < count ? t : count - 1];
    const uint8_t* group = weight.group(index);
    const uint8_t* data = group + kernels::header_bytes(format, weight.cols);
    __m512 sum[tokens];
    for (int t = 0; t < tokens; ++t) sum[t] = _mm512_setzero_ps();
    const int64_t superblocks = kernels::padded_cols(weight.cols) / kernels::kSuperblock;
    for (int64_t s = 0; s < superblocks; ++s) {
      add_superblock<format, tokens>(weight, group, data, s, row, sum);
      prefetch<kernels::superblock_bytes(format)>(data);
      data += kernels::superblock_bytes(format);
    }
    for (int t = 0; t < count; ++t) _mm512_storeu_ps(sums[t] + offset, sum[t]);
  }

  template <int64_t bytes>
  [[gnu::always_inline]] static void prefetch(const uint8_t* data) {
    constexpr int64_t kAhead = 4096;
    for (int64_t line = 0; line < bytes; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(data + kAhead + line), _MM_HINT_T0);
    }
  }

  template <PackedFormat format, int tokens>
  [[gnu::always_inline]] static void add_superblock(const PackedWeight& weight,
                                                    const uint8_t* group, const uint8_t* data,
                                                    int64_t s, const Int8Row* row, __m512* sum) {
    constexpr int kPhases = 32 / format.sub_block;
    unroll<kPhases>([&](auto phase_constant) __attribute__((always_inline)) {
      constexpr int phase = phase_constant;
      __m512i integer[2][tokens];
      unroll<2>([&](auto f) __attribute__((always_inline)) {
        for (int t = 0; t < tokens; ++t) {
          integer[f][t] = bias<format, phase>(row[t].sums16 + 4 * s + 2 * f);
        }
      });
      unroll<8 / kPhases>([&](auto step) __attribute__((always_inline)) {
        constexpr int i = phase * (8 / kPhases) + step;
        __m512i operand[2];
        load_operands<format.bits, i>(data, operand);
        unroll<2>([&](auto f) __attribute__((always_inline)) {
          for (int t = 0; t < tokens; ++t) {
            const __m512i a = broadcast_dword(row[t].q + 64 * s + 32 * f + 4 * i);
            integer[f][t] = _mm512_dpbusd_epi32(integer[f][t], operand[f], a);
          }
        });
      });
      unroll<2>([&](auto f) __attribute__((always_inline)) {
        finish<format, phase, tokens>(weight, group, data, s, f, row, integer[f], sum);
      });
    });
  }

  // -zero * the sum of the sub-block's activations; `sums16` are the two halves of its block.
  template <PackedFormat format, int phase>
  [[gnu::always_inline]] static __m512i bias(const int16_t* sums16) {
    if constexpr (format.zero == 0) return _mm512_setzero_si512();
    constexpr uint32_t kZero = static_cast<uint16_t>(-format.zero);
    constexpr uint32_t kFactors = format.sub_block == 32 ? kZero << 16 | kZero
                                  : phase == 0           ? kZero
                                                         : kZero << 16;
    return _mm512_madd_epi16(_mm512_set1_epi32(static_cast<int32_t>(kFactors)),
                             broadcast_dword(sums16));
  }

  template <PackedFormat format, int phase, int tokens>
  [[gnu::always_inline]] static void finish(const PackedWeight& weight, const uint8_t* group,
                                            const uint8_t* data, int64_t s, int f,
                                            const Int8Row* row, const __m512i* integer,
                                            __m512* sum) {
    const int sub = f * (32 / format.sub_block) + phase;
    const auto [scale, min] = load_affine<format>(weight, group, data, s, sub);
    for (int t = 0; t < tokens; ++t) {
      const float activation_scale = row[t].scales[2 * s + f];
      sum[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integer[t]),
                               _mm512_mul_ps(scale, _mm512_set1_ps(activation_scale)), sum[t]);
      if constexpr (format.has_min) {
        const float scaled =
            format.sub_block == 32
                ? row[t].sums[2 * s + f]
                : activation_scale * static_cast<float>(row[t].sums16[4 * s + 2 * f + phase]);
        sum[t] = _mm512_fmadd_ps(min, _mm512_set1_ps(scaled), sum[t]);
      }
    }
  }
};

}  // namespace

void matmul_int8(const kernels::MatmulProblem& problem, Team& team) {
  Int8Matmul<Avx512>::run(problem, team);
}

}  // namespace effinfer::cpu::avx512
