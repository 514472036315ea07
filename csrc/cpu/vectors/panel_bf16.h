// Panels of bfloat16 weights, [k / 2][16 rows][2 k]: the operand of VDPBF16PS, and 16 of its lines
// are a B tile of TDPBF16PS.
#pragma once

#include "cpu/level.h"
#include "cpu/vectors/packed_avx512.h"

namespace effinfer::cpu::avx512bf16 {
namespace {

struct Bf16Panel {
  static constexpr int64_t kLine = ops::kGroupRows * 4;  // bytes of two k
  static constexpr int64_t kSuperblockBytes = ops::kSuperblock / 2 * kLine;

  // Superblock `s` of a quantised group.
  template <PackedFormat format>
  [[gnu::always_inline]] static void quantised(const PackedWeight& weight, const uint8_t* group,
                                               int64_t s, uint8_t* out) {
    dequantize_superblock<format>(
        weight, group, s, [&](int line, const __m512* values) __attribute__((always_inline)) {
          store_pair(values[0], values[1], out + line * 2 * kLine);
          store_pair(values[2], values[3], out + line * 2 * kLine + kLine);
        });
  }

  // k [k, k + count) of a group of f16 or f32 weights.
  static void dense(QuantBits bits, const uint8_t* group, int64_t k, int64_t count, uint8_t* out) {
    for (int64_t i = 0; i < count; i += 2) {
      __m512 values[2];
      for (int64_t j = 0; j < 2; ++j) {
        const int64_t row = (k + i + j) * ops::kGroupRows;
        values[j] = bits == QuantBits::f16
                        ? load_halves(group + row * 2)
                        : _mm512_loadu_ps(reinterpret_cast<const float*>(group) + row);
      }
      store_pair(values[0], values[1], out + i / 2 * kLine);
    }
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
};

}  // namespace
}  // namespace effinfer::cpu::avx512bf16
