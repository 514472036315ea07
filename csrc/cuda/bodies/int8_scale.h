// How numbers that share a scale become int8, with the bits that the CPU writes.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/unit.h"
#include "ops/operand.h"

namespace effinfer::cuda {

// Magnitudes as integers, which have the order of floats, infinities and NaNs above all.
EFFINFER_DEVICE uint32_t magnitude_bits(float x) {
  return bits_of(x) & 0x7fffffff;
}

// By the largest of the magnitudes. Numbers that are not finite, or all next to zero, become zeros.
struct Int8Scale {
  EFFINFER_DEVICE explicit Int8Scale(uint32_t largest_bits) {
    const float largest = float_of(largest_bits);
    const bool finite = largest_bits < 0x7f800000;
    zero = !finite || !(largest >= ops::kSmallestBlock);
    factor = zero ? 0.0f : 127.0f / largest;
    scale = !finite ? float_of(0x7fc00000) : zero ? 0.0f : largest / 127.0f;
  }
  EFFINFER_DEVICE int32_t round(float x) const {
    return zero ? 0 : static_cast<int32_t>(rintf(x * factor));
  }

  bool zero;
  float factor;
  float scale;  // of the int8; NaN where some number is not finite
};

}  // namespace effinfer::cuda
