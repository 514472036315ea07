// Float32 matmul for AVX-512: 24 sums of 2 groups x 12 tokens, 2 panel lines and broadcast
// activations fill the 32 registers.
#pragma once

#include "core/tuned.h"
#include "cpu/matmul_units.h"
#include "cpu/quantised_formats.h"
#include "cpu/vectors/packed_avx512.h"
#include "cpu/vectors/token_rows.h"

namespace effinfer::cpu::avx512 {
namespace {

struct Panel {
  static constexpr int kTokens = 12;
  static constexpr int kUnits = 1;
  static constexpr int64_t kStretch = 256;
  static constexpr int kStreamTiles = 1;
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
        float* block = out + i * kRows;
        dequantize_superblock<format>(
            weight, group, (k + i) / ops::kSuperblock,
            [&](int line, const __m512* values) __attribute__((always_inline)) {
              for (int j = 0; j < 4; ++j) {
                _mm512_store_ps(block + (4 * line + j) * kRows, values[j]);
              }
            });
      }
    });
    return scratch;
  }

  static void multiply(const ops::PackedFormat&, const uint8_t* const* panels, int64_t first_k,
                       int64_t count, const TokenRows& rows, int tokens, float (*sums)[32]) {
    const uint8_t* x = rows.data + first_k * 4;
    const int64_t x_stride = rows.stride;
    unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
      if (tokens == index + 1) multiply_tile<index + 1>(panels, count, x, x_stride, sums);
    });
  }

  static void stream(const PackedWeight& weight, const uint8_t* const* groups, const uint8_t* x,
                     int64_t x_stride, int tokens, float (*sums)[32]) {
    unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
      if (tokens != index + 1) return;
      constexpr int kCount = index + 1;
      switch (weight.format.bits) {
        case QuantBits::f16:
          return stream_tile<QuantBits::f16, kCount>(weight, groups, x, x_stride, sums);
        case QuantBits::bf16:
          return stream_tile<QuantBits::bf16, kCount>(weight, groups, x, x_stride, sums);
        default:
          return stream_tile<QuantBits::f32, kCount>(weight, groups, x, x_stride, sums);
      }
    });
  }

 private:
  // Two consecutive k of 16 rows.
  template <QuantBits bits>
  [[gnu::always_inline]] static void load_pair(const uint8_t* data, __m512* values) {
    if constexpr (bits == QuantBits::bf16) {
      // The even k lies in the low halves of the dwords.
      const __m512i line = load(data);
      values[0] = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
      values[1] = _mm512_castsi512_ps(
          _mm512_and_si512(line, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    } else if constexpr (bits == QuantBits::f16) {
      values[0] = load_halves(data);
      values[1] = load_halves(data + 32);
    } else {
      values[0] = _mm512_loadu_ps(data);
      values[1] = _mm512_loadu_ps(data + 64);
    }
  }

  // Sums run over k in the order of multiply_tile: the same bits.
  template <QuantBits bits, int tokens>
  static void stream_tile(const PackedWeight& weight, const uint8_t* const* groups,
                          const uint8_t* x, int64_t x_stride, float (*sums)[32]) {
    constexpr int64_t kPairBytes = ops::quant_bytes(bits) / (ops::kSuperblock / 2);
    constexpr FetchDistance kManyRows = {4096, 0};
    const FetchDistance fetch = tokens <= 2 ? fetch_distance(WeightStream::dense) : kManyRows;
    __m512 sum[tokens][2];
    for (int t = 0; t < tokens; ++t) sum[t][0] = sum[t][1] = _mm512_setzero_ps();
    const int64_t cols = ops::padded_cols(weight.cols);
    for (int64_t k = 0; k < cols; k += 2) {
      __m512 values[2][2];
      for (int g = 0; g < 2; ++g) {
        const uint8_t* data = groups[g] + k / 2 * kPairBytes;
        load_pair<bits>(data, values[g]);
        for (int64_t line = 0; line < kPairBytes; line += 64) {
          fetch_ahead(data + line, fetch);
        }
      }
      for (int j = 0; j < 2; ++j) {
        for (int t = 0; t < tokens; ++t) {
          const auto* row = reinterpret_cast<const float*>(x + t * x_stride);
          const __m512 value = _mm512_set1_ps(row[k + j]);
          for (int g = 0; g < 2; ++g) sum[t][g] = _mm512_fmadd_ps(values[g][j], value, sum[t][g]);
        }
      }
    }
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) _mm512_storeu_ps(sums[t] + 16 * g, sum[t][g]);
    }
  }

  static void dense_panel(QuantBits bits, const uint8_t* data, int64_t count, float* out) {
    if (bits == QuantBits::f16) {
      for (int64_t k = 0; k < count; ++k) {
        _mm512_store_ps(out + k * kRows, load_halves(data + k * kRows * 2));
      }
      return;
    }
    // A line holds 2 k of bfloat16: the even one in the low halves of the dwords.
    for (int64_t k = 0; k < count; k += 2) {
      const __m512i line = load(data + k * kRows * 2);
      _mm512_store_si512(out + k * kRows, _mm512_slli_epi32(line, 16));
      _mm512_store_si512(out + (k + 1) * kRows,
                         _mm512_and_si512(line, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
  }

  template <int tokens>
  static void multiply_tile(const uint8_t* const* panels, int64_t count, const uint8_t* x,
                            int64_t x_stride, float (*sums)[32]) {
    __m512 sum[tokens][2];
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) sum[t][g] = _mm512_loadu_ps(sums[t] + 16 * g);
    }
    const auto* weights0 = reinterpret_cast<const float*>(panels[0]);
    const auto* weights1 = reinterpret_cast<const float*>(panels[1]);
    for (int64_t k = 0; k < count; ++k) {
      const __m512 w0 = _mm512_load_ps(weights0 + k * kRows);
      const __m512 w1 = _mm512_load_ps(weights1 + k * kRows);
      for (int t = 0; t < tokens; ++t) {
        const __m512 value = _mm512_set1_ps(reinterpret_cast<const float*>(x + t * x_stride)[k]);
        sum[t][0] = _mm512_fmadd_ps(w0, value, sum[t][0]);
        sum[t][1] = _mm512_fmadd_ps(w1, value, sum[t][1]);
      }
    }
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) _mm512_storeu_ps(sums[t] + 16 * g, sum[t][g]);
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx512
