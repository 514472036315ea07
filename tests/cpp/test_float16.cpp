#include <cmath>
#include <limits>

#include "check.h"
#include "core/float16.h"

using effinfer::bf16_to_f32;
using effinfer::f16_to_f32;
using effinfer::f32_to_bf16;
using effinfer::f32_to_f16;

namespace {

// The value of a half by the definition of the format.
double half_value(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int mantissa = half & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return half >> 15 != 0 ? -magnitude : magnitude;
}

}  // namespace

TEST("f16: all 65536 values widen exactly and narrow back") {
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint16_t half = static_cast<uint16_t>(i);
    const float wide = f16_to_f32(half);
    const bool special = (half & 0x7c00) == 0x7c00;
    if (special && (half & 0x3ff) != 0) {
      CHECK(std::isnan(wide));
      CHECK_EQ(f32_to_f16(wide), half | 0x200);
    } else {
      if (special) {
        CHECK(std::isinf(wide) && std::signbit(wide) == (half >> 15 != 0));
      } else {
        CHECK(wide == half_value(half) && std::signbit(wide) == (half >> 15 != 0));
      }
      CHECK_EQ(f32_to_f16(wide), half);
    }
  }
}

TEST("f16: narrowing rounds to nearest, ties to even") {
  for (uint16_t half = 0; half < 0x7bff; ++half) {
    const float low = f16_to_f32(half);
    const float high = f16_to_f32(static_cast<uint16_t>(half + 1));
    const float middle = (low + high) / 2;  // exact: one more bit than half has
    const uint16_t even = static_cast<uint16_t>(half + (half & 1));
    CHECK_EQ(f32_to_f16(middle), even);
    CHECK_EQ(f32_to_f16(std::nextafter(middle, 0.0f)), half);
    CHECK_EQ(f32_to_f16(std::nextafter(middle, high)), half + 1);
    CHECK_EQ(f32_to_f16(-middle), even | 0x8000);
  }
  CHECK_EQ(f32_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  CHECK_EQ(f32_to_f16(65520.0f), 0x7c00);
  CHECK_EQ(f32_to_f16(std::numeric_limits<float>::max()), 0x7c00);
  CHECK_EQ(f32_to_f16(std::numeric_limits<float>::denorm_min()), 0);
}

TEST("bf16: all values round-trip; narrowing rounds to nearest, ties to even") {
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint16_t value = static_cast<uint16_t>(i);
    const bool nan = (value & 0x7fff) > 0x7f80;
    CHECK_EQ(f32_to_bf16(bf16_to_f32(value)), nan ? value | 0x40 : value);
  }
  CHECK_EQ(f32_to_bf16(0x1.01p0f), 0x3f80);        // halfway, even below
  CHECK_EQ(f32_to_bf16(0x1.03p0f), 0x3f82);        // halfway, even above
  CHECK_EQ(f32_to_bf16(0x1.010002p0f), 0x3f81);    // just above halfway
  CHECK_EQ(f32_to_bf16(0x1.fffffep127f), 0x7f80);  // overflows to infinity
}

CHECK_MAIN()
