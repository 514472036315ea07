// The 8-bit floats of the OCP 8-bit Floating Point Specification 1.0 to and from float32: exact
// widening, round-to-nearest-even narrowing. What is too large becomes the NaN of e4m3, which has
// no infinities, and an infinity of e5m2; as torch and ml_dtypes convert. Always inlined, so that
// ISA files may use them without emitting shared symbols.
//
//   e4m3  s eeee mmm  bias 7   largest 448    NaN s1111111
//   e5m2  s eeeee mm  bias 15  largest 57344  infinity s1111100, NaNs above it: a half's high byte
#pragma once

#include <bit>
#include <cstdint>

#include "core/float16.h"

namespace effinfer {

// As a half with the fields of e4m3 in place, the value is 2^(7 - 15) of itself, subnormals too.
[[gnu::always_inline]] inline constexpr float f8_e4m3_to_f32(uint8_t value) {
  const uint32_t magnitude = value & 0x7fu;
  const uint32_t nan = 0u - static_cast<uint32_t>(magnitude == 0x7fu);
  const uint32_t half = (value & 0x80u) << 8 | magnitude << 7;
  const float wide = f16_to_f32(static_cast<uint16_t>(half)) * 256.0f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(wide) | (nan & 0x7fffffffu));
}

[[gnu::always_inline]] inline constexpr float f8_e5m2_to_f32(uint8_t value) {
  return f16_to_f32(static_cast<uint16_t>(value << 8));
}

// A magnitude that is normal in either 8-bit format is rebiased and rounded in its bits; for the
// others an addition rounds, to a float whose ulp is that of the subnormals.
[[gnu::always_inline]] inline constexpr uint8_t f32_to_f8_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 24 & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t narrow = 0x7fu;
  if (magnitude >= 0x3c800000u) {  // 2^-6; to 448 and its ties is narrowed, the rest is no number
    if (magnitude <= 0x43e80000u) {
      narrow = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    }
  } else {
    narrow = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) -
             std::bit_cast<uint32_t>(0x1p14f);
  }
  return static_cast<uint8_t>(sign | narrow);
}

[[gnu::always_inline]] inline constexpr uint8_t f32_to_f8_e5m2(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 24 & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t narrow = 0;
  if (magnitude > 0x7f800000u) {
    narrow = 0x7fu;
  } else if (magnitude >= 0x47700000u) {  // 61440, halfway from 57344 to 2^16, and above
    narrow = 0x7cu;
  } else if (magnitude >= 0x38800000u) {  // 2^-14
    narrow = (magnitude - (112u << 23) + 0xfffffu + (magnitude >> 21 & 1u)) >> 21;
  } else {
    narrow = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p7f) -
             std::bit_cast<uint32_t>(0x1p7f);
  }
  return static_cast<uint8_t>(sign | narrow);
}

}  // namespace effinfer
