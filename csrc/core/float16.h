// IEEE binary16 and bfloat16 to and from float32: exact widening, round-to-nearest-even narrowing,
// the same bits as the hardware conversions in the default rounding mode and without flush-to-zero.
// NaNs stay NaNs: widening keeps their bits (where F16C sets the quiet bit), narrowing quiets them.
// Always inlined, so that ISA files may use them without emitting shared symbols.
#pragma once

#include <bit>
#include <cstdint>

namespace effinfer {

// What rows of such elements point to.
struct F16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

// Every binary16 number is a float32 number.
[[gnu::always_inline]] inline constexpr float f16_to_f32(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t magnitude = half & 0x7fffu;
  // Normal: the exponent's bias goes from 15 to 127. Infinity and NaN: from 31 on to 255.
  constexpr uint32_t kRebias = 112u << 23;
  const uint32_t special = 0u - static_cast<uint32_t>(magnitude >= 0x7c00u);
  const uint32_t normal = (magnitude << 13) + kRebias + (kRebias & special);
  // Subnormal or zero: magnitude * 2^-24, exact. Selected by mask: a branch keeps loops scalar.
  const float product = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t subnormal = 0u - static_cast<uint32_t>(magnitude < 0x0400u);
  const uint32_t bits = (std::bit_cast<uint32_t>(product) & subnormal) | (normal & ~subnormal);
  return std::bit_cast<float>(sign | bits);
}

[[gnu::always_inline]] inline constexpr uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half = 0;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520, halfway from the largest half to 2^16, and above
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14: normal in half
    half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  } else {
    // Subnormal in half: the ulp of numbers in [0.5, 1) is 2^-24, that of half's subnormals, so the
    // addition itself rounds to nearest even.
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
           std::bit_cast<uint32_t>(0.5f);
  }
  return static_cast<uint16_t>(sign | half);
}

[[gnu::always_inline]] inline constexpr float bf16_to_f32(uint16_t value) {
  return std::bit_cast<float>(uint32_t{value} << 16);
}

// To bfloat16, down or up. NaN stays one.
[[gnu::always_inline]] inline constexpr uint16_t bf16_rounded(float value, bool up) {
  if (value != value) return 0x7fc0;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool outwards = (bits & 0xffffu) != 0 && (bits >> 31 == 0) == up;
  return static_cast<uint16_t>((bits >> 16) + (outwards ? 1u : 0u));
}

[[gnu::always_inline]] inline constexpr uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace effinfer
