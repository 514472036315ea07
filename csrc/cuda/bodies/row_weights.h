// The weights of a row's tokens, and which of them filters keep.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/unit.h"

namespace effinfer::cuda {

// Floats in the order of these numbers, both zeros alike. Not of a NaN.
EFFINFER_DEVICE uint32_t key_of(float value) {
  const uint32_t bits = bits_of(value + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
EFFINFER_DEVICE float value_of(uint32_t key) {
  return float_of((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}

// The head of a row in the order (value descending, index ascending), told by its last element. No
// NaN is in it.
struct RowHead {
  float least = -INFINITY;
  int ties_end = INT32_MAX;  // values equal to `least` are in it before this index

  EFFINFER_DEVICE bool has(float value, int index) const {
    return value > least || (value == least && index < ties_end);
  }
};

EFFINFER_DEVICE RowHead shorter(const RowHead& a, const RowHead& b) {
  if (a.least != b.least) return a.least > b.least ? a : b;
  return {a.least, a.ties_end < b.ties_end ? a.ties_end : b.ties_end};
}

// What a token weighs: exp((x - highest) factor) of a logit, or what it says. One kernel has both:
// it is large, and a branch that all threads take costs little.
struct RowWeights {
  bool of_logits = true;
  float highest = 0.0f;
  float factor = 1.0f;
  float rate = 0.0f;  // the factor of powers of two

  EFFINFER_DEVICE void set(float highest_value, float inverse_temperature) {
    highest = highest_value;
    factor = inverse_temperature;
    rate = fminf(factor * 1.44269504f, 3.40282347e38f);
  }

  // The bits of the CPU's kernel (RowPasses::exp_nonpositive in csrc/cpu/row_math.simd.cpp): every
  // product is rounded by itself, but for the one with n, which is exact. 0 of a NaN.
  template <class Unit>
  EFFINFER_DEVICE float exact(Unit& unit, float x) const {
    if (!of_logits) return x;
    constexpr float kRound = 12582912.0f;  // 1.5 2^23: rounds to integers what is added to it
    const float a = unit.mul(x - highest, factor);
    const float shifted = unit.mul(a, 1.44269504f) + kRound;
    const float n = shifted - kRound;
    const float r = (a - n * 0.693359375f) + unit.mul(n, 2.12194440e-4f);
    float p = 1.98412698e-4f;
    p = unit.mul(p, r) + 1.38888889e-3f;
    p = unit.mul(p, r) + 8.33333333e-3f;
    p = unit.mul(p, r) + 4.16666667e-2f;
    p = unit.mul(p, r) + 1.66666667e-1f;
    p = unit.mul(p, r) + 0.5f;
    p = unit.mul(p, r) + 1.0f;
    p = unit.mul(p, r) + 1.0f;
    const float scaled = float_of(bits_of(p) + ((bits_of(shifted) - bits_of(kRound)) << 23));
    return a > -87.0f ? scaled : 0.0f;
  }

  // Within 2^-14 of it, but for what weighs less than e^-80.
  template <class Unit>
  EFFINFER_DEVICE float about(Unit& unit, float x) const {
    if (!of_logits) return x;
    return unit.exp2((x - highest) * rate);
  }

  // Two values that are further apart weigh as they are ordered: what exact() rounds does not
  // matter. |x| and |highest| at most `size`.
  EFFINFER_DEVICE float margin(float size) const {
    if (!of_logits) return 0.0f;
    // 2^-14 in the exponent is more than the rounding of 87 and of the polynomial.
    return 0x1p-14f / factor + size * 0x1p-22f;
  }
  EFFINFER_DEVICE float margin_at(float value) const {
    const float size = fmaxf(fabsf(value), fabsf(highest));
    return size < INFINITY ? margin(size) : 0.0f;
  }
};

}  // namespace effinfer::cuda
