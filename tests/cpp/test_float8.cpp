#include <cmath>
#include <limits>

#include "check.h"
#include "core/float8.h"

using effinfer::f32_to_f8_e4m3;
using effinfer::f32_to_f8_e5m2;
using effinfer::f8_e4m3_to_f32;
using effinfer::f8_e5m2_to_f32;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A value by the definition of a format of `mantissa` bits and that bias, without its specials.
double value_of(int bits, int mantissa, int bias) {
  const int exponent = (bits & 0x7f) >> mantissa;
  const int fraction = bits & ((1 << mantissa) - 1);
  const double magnitude = exponent == 0
                               ? std::ldexp(fraction, 1 - bias - mantissa)
                               : std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// Positive neighbours and what lies halfway between them.
template <class Narrow, class Widen>
void check_rounding(int largest, Narrow narrow, Widen widen) {
  for (int bits = 0; bits < largest; ++bits) {
    const float low = widen(static_cast<uint8_t>(bits));
    const float high = widen(static_cast<uint8_t>(bits + 1));
    const float middle = (low + high) / 2;  // exact
    const int even = bits + (bits & 1);
    CHECK_EQ(int{narrow(middle)}, even);
    CHECK_EQ(int{narrow(-middle)}, even | 0x80);
    CHECK_EQ(int{narrow(std::nextafter(middle, 0.0f))}, bits);
    CHECK_EQ(int{narrow(std::nextafter(middle, kInfinity))}, bits + 1);
  }
}

}  // namespace

TEST("f8_e4m3: all values widen exactly and narrow back") {
  for (int bits = 0; bits < 256; ++bits) {
    const float wide = f8_e4m3_to_f32(static_cast<uint8_t>(bits));
    if ((bits & 0x7f) == 0x7f) {
      CHECK(std::isnan(wide));
    } else {
      CHECK(wide == value_of(bits, 3, 7) && std::signbit(wide) == (bits >= 128));
    }
    CHECK_EQ(int{f32_to_f8_e4m3(wide)}, bits);
  }
}

TEST("f8_e5m2: all values widen exactly and narrow back") {
  for (int bits = 0; bits < 256; ++bits) {
    const float wide = f8_e5m2_to_f32(static_cast<uint8_t>(bits));
    if ((bits & 0x7f) > 0x7c) {
      CHECK(std::isnan(wide));
      CHECK_EQ(int{f32_to_f8_e5m2(wide)}, bits | 0x7f);
      continue;
    }
    const double expected =
        (bits & 0x7f) == 0x7c ? std::copysign(kInfinity, wide) : value_of(bits, 2, 15);
    CHECK(wide == expected && std::signbit(wide) == (bits >= 128));
    CHECK_EQ(int{f32_to_f8_e5m2(wide)}, bits);
  }
}

TEST("f8: narrowing rounds to nearest, ties to even") {
  check_rounding(0x7e, f32_to_f8_e4m3, f8_e4m3_to_f32);
  check_rounding(0x7b, f32_to_f8_e5m2, f8_e5m2_to_f32);
}

TEST("f8: what is too large or no number") {
  CHECK_EQ(int{f32_to_f8_e4m3(464.0f)}, 0x7e);  // halfway from 448 to what would be 480
  for (const float value : {std::nextafter(464.0f, 500.0f), 1e30f, kInfinity, kNan}) {
    CHECK_EQ(int{f32_to_f8_e4m3(value)}, 0x7f);
    CHECK_EQ(int{f32_to_f8_e4m3(-value)}, 0xff);
  }
  CHECK_EQ(int{f32_to_f8_e5m2(std::nextafter(61440.0f, 0.0f))}, 0x7b);
  for (const float value : {61440.0f, 1e30f, kInfinity}) {
    CHECK_EQ(int{f32_to_f8_e5m2(value)}, 0x7c);
    CHECK_EQ(int{f32_to_f8_e5m2(-value)}, 0xfc);
  }
  CHECK_EQ(int{f32_to_f8_e5m2(kNan)}, 0x7f);
}

CHECK_MAIN()
