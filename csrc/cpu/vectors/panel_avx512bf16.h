// Bfloat16 matmul for AVX512-BF16: VDPBF16PS adds two products of each of 16 rows. The tile is that
// of the float32 kernel.
#pragma once

#include "cpu/quantised_formats.h"
#include "cpu/vectors/panel_bf16.h"
#include "cpu/vectors/token_rows.h"

namespace effinfer::cpu::avx512bf16 {
namespace {

struct Panel {
  static constexpr int kTokens = 12;
  static constexpr int kUnits = 1;
  static constexpr int64_t kStretch = 512;
  static constexpr int kStreamTiles = 0;
  static constexpr int64_t kRows = ops::kGroupRows;

  // Panels are [k / 2][16 rows][2 k].
  static const uint8_t* panel(const PackedWeight& weight, int64_t group_index, int64_t k,
                              int64_t count, uint8_t* scratch) {
    const uint8_t* group = weight.group(group_index);
    if (weight.format.scales == ScaleKind::dense) {
      if (weight.format.bits == QuantBits::bf16) return group + k * kRows * 2;
      Bf16Panel::dense(weight.format.bits, group, k, count, scratch);
      return scratch;
    }
    with_quantised_format(weight.format, [&]<PackedFormat format>() {
      for (int64_t i = 0; i < count; i += ops::kSuperblock) {
        Bf16Panel::quantised<format>(weight, group, (k + i) / ops::kSuperblock,
                                     scratch + i * kRows * 2);
      }
    });
    return scratch;
  }

  static void multiply(const ops::PackedFormat&, const uint8_t* const* panels, int64_t first_k,
                       int64_t count, const TokenRows& rows, int tokens, float (*sums)[32]) {
    const uint8_t* x = rows.data + first_k * 2;
    const int64_t x_stride = rows.stride;
    unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
      if (tokens == index + 1) multiply_tile<index + 1>(panels, count, x, x_stride, sums);
    });
  }

 private:
  template <int tokens>
  static void multiply_tile(const uint8_t* const* panels, int64_t count, const uint8_t* x,
                            int64_t x_stride, float (*sums)[32]) {
    __m512 sum[tokens][2];
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) sum[t][g] = _mm512_loadu_ps(sums[t] + 16 * g);
    }
    // A pointer for three rows: twelve would not fit the general registers.
    constexpr int kBases = (tokens + 2) / 3;
    const uint8_t* base[kBases];
    for (int i = 0; i < kBases; ++i) base[i] = x + 3 * i * x_stride;
    const uint8_t* weights0 = panels[0];
    const uint8_t* weights1 = panels[1];
    for (const uint8_t* end = weights0 + count * kRows * 2; weights0 < end;) {
      const auto w0 = (__m512bh)load(weights0);
      const auto w1 = (__m512bh)load(weights1);
      weights0 += 64;
      weights1 += 64;
      for (int t = 0; t < tokens; ++t) {
        const auto value = (__m512bh)broadcast_dword(base[t / 3] + t % 3 * x_stride);
        sum[t][0] = _mm512_dpbf16_ps(sum[t][0], w0, value);
        sum[t][1] = _mm512_dpbf16_ps(sum[t][1], w1, value);
      }
      for (int i = 0; i < kBases; ++i) base[i] += 4;
    }
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) _mm512_storeu_ps(sums[t] + 16 * g, sum[t][g]);
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx512bf16
