// Float32 matmul for AVX2: 12 sums of one group (two registers) x 6 tokens, two panel halves and a
// broadcast activation fill the 16 registers.
#pragma once

#include "core/tuned.h"
#include "cpu/matmul_units.h"
#include "cpu/quantised_formats.h"
#include "cpu/vectors/packed_avx2.h"
#include "cpu/vectors/token_rows.h"

namespace effinfer::cpu::avx2 {
namespace {

struct Panel {
  static constexpr int kTokens = 6;
  static constexpr int kUnits = 1;
  static constexpr int64_t kStretch = 256;
  static constexpr int kStreamTiles = 2;
  static constexpr int64_t kRows = ops::kGroupRows;

  static const uint8_t* panel(const PackedWeight& weight, int64_t group_index, int64_t k,
                              int64_t count, uint8_t* scratch) {
    const uint8_t* group = weight.group(group_index);
    auto* out = reinterpret_cast<float*>(scratch);
    if (weight.format.scales == ScaleKind::dense) {
      if (weight.format.bits == QuantBits::f32) return group + k * kRows * 4;
      dense_panel(weight.format.bits, group + k * kRows * 2, count, out);
      return scratch;
    }
    with_quantised_format(weight.format, [&]<PackedFormat format>() {
      for (int64_t i = 0; i < count; i += ops::kSuperblock) {
        for (int half = 0; half < 2; ++half) {
          dequantize<format>(weight, group, (k + i) / ops::kSuperblock, half,
                             out + i * kRows + half * 8);
        }
      }
    });
    return scratch;
  }

  static void multiply(const ops::PackedFormat&, const uint8_t* const* panels, int64_t first_k,
                       int64_t count, const TokenRows& rows, int tokens, float (*sums)[32]) {
    const uint8_t* x = rows.data + first_k * 4;
    const int64_t x_stride = rows.stride;
    unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
      if (tokens != index + 1) return;
      for (int g = 0; g < 2; ++g) {
        multiply_tile<index + 1>(reinterpret_cast<const float*>(panels[g]), count, x, x_stride,
                                 sums, 16 * g);
      }
    });
  }

  static void stream(const PackedWeight& weight, const uint8_t* const* groups, const uint8_t* x,
                     int64_t x_stride, int tokens, float (*sums)[32]) {
    switch (weight.format.bits) {
      case QuantBits::f16:
        return stream_tokens<QuantBits::f16>(weight, groups, x, x_stride, tokens, sums);
      case QuantBits::bf16:
        return stream_tokens<QuantBits::bf16>(weight, groups, x, x_stride, tokens, sums);
      default:
        return stream_tokens<QuantBits::f32>(weight, groups, x, x_stride, tokens, sums);
    }
  }

 private:
  // Two consecutive k of 16 rows: values[k][half].
  template <QuantBits bits>
  [[gnu::always_inline]] static void load_pair(const uint8_t* data, __m256 (*values)[2]) {
    for (int half = 0; half < 2; ++half) {
      if constexpr (bits == QuantBits::bf16) {
        // The even k lies in the low halves of the dwords.
        const __m256i line = load(data + 32 * half);
        values[0][half] = _mm256_castsi256_ps(_mm256_slli_epi32(line, 16));
        values[1][half] = _mm256_castsi256_ps(
            _mm256_and_si256(line, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
      } else {
        for (int k = 0; k < 2; ++k) {
          const int place = 2 * k + half;
          values[k][half] = bits == QuantBits::f16
                                ? load_halves(data + 16 * place)
                                : _mm256_loadu_ps(reinterpret_cast<const float*>(data) + 8 * place);
        }
      }
    }
  }

  template <QuantBits bits>
  static void stream_tokens(const PackedWeight& weight, const uint8_t* const* groups,
                            const uint8_t* x, int64_t x_stride, int tokens, float (*sums)[32]) {
    // A token alone has both groups at once: more chains of additions.
    if (tokens == 1) return stream_tile<bits, 2, 1>(weight, groups, x, x_stride, sums, 0);
    unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
      if (tokens != index + 1) return;
      for (int g = 0; g < 2; ++g) {
        stream_tile<bits, 1, index + 1>(weight, groups + g, x, x_stride, sums, 16 * g);
      }
    });
  }

  // Sums run over k in the order of multiply_tile: the same bits.
  template <QuantBits bits, int groups, int tokens>
  static void stream_tile(const PackedWeight& weight, const uint8_t* const* group, const uint8_t* x,
                          int64_t x_stride, float (*sums)[32], int offset) {
    constexpr int64_t kPairBytes = ops::quant_bytes(bits) / (ops::kSuperblock / 2);
    constexpr FetchDistance kManyRows = {4096, 0};
    const FetchDistance fetch = tokens <= 2 ? fetch_distance(WeightStream::dense) : kManyRows;
    __m256 sum[tokens][2 * groups];
    for (int t = 0; t < tokens; ++t) {
      for (int h = 0; h < 2 * groups; ++h) sum[t][h] = _mm256_setzero_ps();
    }
    const int64_t cols = ops::padded_cols(weight.cols);
    for (int64_t k = 0; k < cols; k += 2) {
      for (int g = 0; g < groups; ++g) {
        const uint8_t* data = group[g] + k / 2 * kPairBytes;
        __m256 values[2][2];
        load_pair<bits>(data, values);
        for (int64_t line = 0; line < kPairBytes; line += 64) {
          fetch_ahead(data + line, fetch);
        }
        for (int j = 0; j < 2; ++j) {
          for (int t = 0; t < tokens; ++t) {
            const auto* row = reinterpret_cast<const float*>(x + t * x_stride);
            const __m256 value = _mm256_set1_ps(row[k + j]);
            for (int h = 0; h < 2; ++h) {
              sum[t][2 * g + h] = _mm256_fmadd_ps(values[j][h], value, sum[t][2 * g + h]);
            }
          }
        }
      }
    }
    for (int t = 0; t < tokens; ++t) {
      for (int h = 0; h < 2 * groups; ++h) _mm256_storeu_ps(sums[t] + offset + 8 * h, sum[t][h]);
    }
  }

  static void dense_panel(QuantBits bits, const uint8_t* data, int64_t count, float* out) {
    if (bits == QuantBits::f16) {
      for (int64_t i = 0; i < count * kRows; i += 8) {
        _mm256_store_ps(out + i, load_halves(data + i * 2));
      }
      return;
    }
    // A line holds 2 k of bfloat16: the even one in the low halves of the dwords.
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    for (int64_t k = 0; k < count; k += 2) {
      for (int64_t r = 0; r < kRows; r += 8) {
        const __m256i half_line = load(data + k * kRows * 2 + r * 4);
        float* even_out = out + k * kRows + r;
        _mm256_store_ps(even_out, _mm256_castsi256_ps(_mm256_slli_epi32(half_line, 16)));
        _mm256_store_ps(even_out + kRows, _mm256_castsi256_ps(_mm256_and_si256(half_line, odd)));
      }
    }
  }

  // 8 rows of one superblock as floats, `out` being [64 k][16 rows]. q * scale - zero * scale is
  // exact where scale * (q - zero) is, and rounds alike where it is not: zero is a power of two, so
  // the fused product and sum round once.
  template <PackedFormat format>
  static void dequantize(const PackedWeight& weight, const uint8_t* group, int64_t s, int half,
                         float* out) {
    const uint8_t* data =
        group + ops::header_bytes(format, weight.cols) + s * ops::superblock_bytes(format);
    unroll<64 / format.sub_block>([&](auto sub) __attribute__((always_inline)) {
      Affine affine = load_affine<format>(weight, group, data, s, sub, half);
      if constexpr (!format.has_min) {
        affine.min = _mm256_mul_ps(affine.scale, _mm256_set1_ps(-float{format.zero}));
      }
      unroll<format.sub_block / 4>([&](auto step) __attribute__((always_inline)) {
        constexpr int line = sub * (format.sub_block / 4) + step;
        const __m256i operand = load_operand<format.bits, line>(data + 32 * half);
        for (int j = 0; j < 4; ++j) {
          const __m256i q =
              _mm256_and_si256(_mm256_srli_epi32(operand, 8 * j), _mm256_set1_epi32(255));
          _mm256_store_ps(out + (4 * line + j) * kRows,
                          _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), affine.scale, affine.min));
        }
      });
    });
  }

  template <int tokens>
  static void multiply_tile(const float* weights, int64_t count, const uint8_t* x, int64_t x_stride,
                            float (*sums)[32], int offset) {
    __m256 sum[tokens][2];
    for (int t = 0; t < tokens; ++t) {
      sum[t][0] = _mm256_loadu_ps(sums[t] + offset);
      sum[t][1] = _mm256_loadu_ps(sums[t] + offset + 8);
    }
    for (int64_t k = 0; k < count; ++k) {
      const __m256 w0 = _mm256_load_ps(weights + k * kRows);
      const __m256 w1 = _mm256_load_ps(weights + k * kRows + 8);
      for (int t = 0; t < tokens; ++t) {
        const __m256 value = _mm256_set1_ps(reinterpret_cast<const float*>(x + t * x_stride)[k]);
        sum[t][0] = _mm256_fmadd_ps(w0, value, sum[t][0]);
        sum[t][1] = _mm256_fmadd_ps(w1, value, sum[t][1]);
      }
    }
    for (int t = 0; t < tokens; ++t) {
      _mm256_storeu_ps(sums[t] + offset, sum[t][0]);
      _mm256_storeu_ps(sums[t] + offset + 8, sum[t][1]);
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx2
