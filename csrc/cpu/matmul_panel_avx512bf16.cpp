// Bfloat16 matmul for AVX512-BF16: VDPBF16PS adds two products of each of 16 rows. The tile is that
// of the float32 kernel.
#include "cpu/matmul.h"
#include "cpu/matmul_panel.h"
#include "cpu/simd/packed_avx512.h"

namespace effinfer::cpu::avx512bf16 {
namespace {

struct Avx512Bf16 {
  static constexpr int kTokens = 12;
  static constexpr int64_t kElementBytes = 2;
  static constexpr int64_t kRows = kernels::kGroupRows;

  // Panels are [k / 2][16 rows][2 k].
  static const uint8_t* panel(const PackedWeight& weight, int64_t group_index, int64_t k,
                              int64_t count, uint8_t* scratch) {
    const uint8_t* group = weight.group(group_index);
    if (weight.format.scales == ScaleKind::dense) {
      if (weight.format.bits == QuantBits::bf16) return group + k * kRows * 2;
      dense_panel(weight.format.bits, group, k, count, scratch);
      return scratch;
    }
    with_quantised_format(weight.format, [&]<PackedFormat format>() {
      for (int64_t i = 0; i < count; i += kernels::kSuperblock) {
        uint8_t* block = scratch + i * kRows * 2;
        dequantize_superblock<format>(
            weight, group, (k + i) / kernels::kSuperblock,
            [&](int line, const __m512* values) __attribute__((always_inline)) {
              store_pair(values[0], values[1], block + line * 128);
              store_pair(values[2], values[3], block + line * 128 + 64);
            });
      }
    });
    return scratch;
  }

  static void multiply(const uint8_t* const* panels, int64_t count, const uint8_t* x,
                       int64_t x_stride, int tokens, float (*sums)[32]) {
    unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
      if (tokens == index + 1) multiply_tile<index + 1>(panels, count, x, x_stride, sums);
    });
  }

 private:
  // The line of two consecutive k: each row's values side by side.
  [[gnu::always_inline]] static void store_pair(__m512 even, __m512 odd, uint8_t* out) {
    alignas(64) static constexpr uint16_t kInterleave[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const auto both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);  // even in the lower half
    _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), both));
  }

  static void dense_panel(QuantBits bits, const uint8_t* group, int64_t k, int64_t count,
                          uint8_t* out) {
    for (int64_t i = 0; i < count; i += 2) {
      __m512 values[2];
      for (int64_t j = 0; j < 2; ++j) {
        const int64_t row = (k + i + j) * kRows;
        values[j] = bits == QuantBits::f16
                        ? load_halves(group + row * 2)
                        : _mm512_loadu_ps(reinterpret_cast<const float*>(group) + row);
      }
      store_pair(values[0], values[1], out + i * kRows * 2);
    }
  }

  template <int tokens>
  static void multiply_tile(const uint8_t* const* panels, int64_t count, const uint8_t* x,
                            int64_t x_stride, float (*sums)[32]) {
    __m512 sum[tokens][2];
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) sum[t][g] = _mm512_loadu_ps(sums[t] + 16 * g);
    }
    for (int64_t k = 0; k < count; k += 2) {
      const auto w0 = (__m512bh)load(panels[0] + k * kRows * 2);
      const auto w1 = (__m512bh)load(panels[1] + k * kRows * 2);
      for (int t = 0; t < tokens; ++t) {
        const auto value = (__m512bh)broadcast_dword(x + t * x_stride + k * 2);
        sum[t][0] = _mm512_dpbf16_ps(sum[t][0], w0, value);
        sum[t][1] = _mm512_dpbf16_ps(sum[t][1], w1, value);
      }
    }
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) _mm512_storeu_ps(sums[t] + 16 * g, sum[t][g]);
    }
  }
};

}  // namespace

void matmul_bf16(const kernels::MatmulProblem& problem, Team& team) {
  PanelMatmul<Avx512Bf16>::run(problem, team);
}

}  // namespace effinfer::cpu::avx512bf16
