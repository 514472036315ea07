// 8-bit numbers of caches, told apart at run time, as the 16-bit ones that kernels multiply: exact,
// as bfloat16 and float16 both have every number of e4m3, e5m2 and int8.
//
// A float's magnitude, shifted to where the wider format has its exponent and mantissa, is a power
// of two of itself, subnormal numbers too. What has no number (core/float8.h) carries into the sign
// when `limit` is added, and becomes `special`, or what it was.
#pragma once

#include <cstdint>

#include "cuda/unit.h"
#include "effinfer/dtype.h"

namespace effinfer::cuda {

EFFINFER_DEVICE constexpr bool is_narrow(DType dtype) {
  return dtype == DType::i8 || dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2;
}

template <DType kType>
class NarrowNumbers {
 public:
  EFFINFER_DEVICE explicit NarrowNumbers(DType dtype) : is_int_(dtype == DType::i8) {
    const bool few = dtype == DType::f8_e5m2;  // bits of the mantissa
    if constexpr (kHalf) {
      shift_ = few ? 0 : 1;
      scale_ = few ? 0x3c003c00 : 0x5c005c00;  // 1, 2^8
      limit_ = few ? 0 : 0x01000100;           // a half's own infinities and NaNs
    } else {
      shift_ = few ? 3 : 4;
      scale_ = few ? 0x77807780 : 0x7b807b80;  // 2^112, 2^120
      limit_ = few ? 0x04000400 : 0x01000100;
    }
    special_ = few ? 0x7f80 : 0x7fff;
  }

  // The 16 numbers of `quad`.
  template <class Unit>
  EFFINFER_DEVICE void widen(Unit& unit, const Quad& quad, Quad& low, Quad& high) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      Quad& to = i < 2 ? low : high;
      EFFINFER_UNROLL
      for (int half = 0; half < 2; ++half) {
        to.words[i % 2 * 2 + half] = widen_pair(unit, quad.words[i], half);
      }
    }
  }

 private:
  static constexpr bool kHalf = kType == DType::f16;
  static constexpr uint32_t kSigns = 0x80008000;

  template <class Unit>
  EFFINFER_DEVICE static uint32_t fma(Unit& unit, uint32_t a, uint32_t b, uint32_t c) {
    return kHalf ? unit.fma_f16x2(a, b, c) : unit.fma_bf16x2(a, b, c);
  }

  template <class Unit>
  EFFINFER_DEVICE uint32_t widen_pair(Unit& unit, uint32_t dword, int half) const {
    if (is_int_) {
      // A number v is m or m - 128 with m = v & 127: 2^n + m has m in its last bits.
      constexpr uint32_t kBase = kHalf ? 0x64006400 : 0x43004300;  // 1024, 128
      constexpr uint32_t kOnes = kHalf ? 0x3c003c00 : 0x3f803f80;
      const uint32_t x = unit.permute(dword, 0, half == 0 ? 0x4140 : 0x4342);
      return fma(unit, (x & 0x007f007f) | kBase, kOnes, (x & 0x00800080) | kBase | kSigns);
    }
    const uint32_t x = unit.permute(dword, 0, half == 0 ? 0x1404 : 0x3424);
    const uint32_t magnitude = x & ~kSigns;
    const uint32_t value = fma(unit, magnitude >> shift_, scale_, 0);
    const uint32_t none = ((magnitude + limit_) & kSigns) >> 15;
    return value | none * special_ | (x & kSigns);
  }

  bool is_int_;
  int shift_;
  uint32_t scale_;
  uint32_t limit_;
  uint32_t special_;
};

}  // namespace effinfer::cuda
