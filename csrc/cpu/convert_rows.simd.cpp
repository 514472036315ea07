// Conversions of floats: selections without branches, which compilers vectorise at every level.
#include "ops/convert_rows.h"

#include <bit>

#include "cpu/float_elements.h"
#include "cpu/level.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Elements that a thread claims at once.
constexpr int64_t kChunk = 16 << 10;

// FloatElement::store() of a magnitude that is at most the largest number, or NaN, without its
// branches: normal numbers are rebiased and rounded in their bits, the others rounded by an
// addition whose result has their ulp.
template <int kMantissa, uint32_t kBias>
[[gnu::always_inline]] inline uint8_t narrow(float value) {
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kSmallestNormal = (128 - kBias) << 23;
  // Its ulp is that of the subnormals.
  constexpr uint32_t kRounder = (128 - kBias - static_cast<uint32_t>(kMantissa) + 23) << 23;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t half = (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1u);
  const uint32_t normal = (magnitude - ((127 - kBias) << 23) + half) >> kShift;
  const uint32_t tiny =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(kRounder)) -
      kRounder;
  uint32_t result = magnitude >= kSmallestNormal ? normal : tiny;
  result = magnitude > 0x7f800000u ? 0x7fu : result;
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | result);
}

// Floats of 8 bits saturate; the bits of the largest one.
template <class To>
struct Narrow {
  static typename To::Stored store(float x) { return To::store(x); }
};
template <int kMantissa, uint32_t kBias, uint32_t kLargest>
struct Saturated {
  static uint8_t store(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const bool large = magnitude > kLargest && magnitude <= 0x7f800000u;  // NaN stays
    return narrow<kMantissa, kBias>(
        std::bit_cast<float>(large ? (bits & 0x80000000u) | kLargest : bits));
  }
};
template <>
struct Narrow<FloatElement<DType::f8_e4m3>> : Saturated<3, 7, 0x43e00000u> {};  // 448
template <>
struct Narrow<FloatElement<DType::f8_e5m2>> : Saturated<2, 15, 0x47600000u> {};  // 57344

// A row of its own: stores of bytes may alias whatever else a loop reads.
template <class From, class To>
void convert_row(const typename From::Stored* x, typename To::Stored* out, int64_t cols,
                 float factor) {
  for (int64_t i = 0; i < cols; ++i) out[i] = Narrow<To>::store(From::load(x[i]) * factor);
}

template <class From, class To>
void convert_rows(const ops::ConvertRowsProblem& p, Team& team) {
  const int64_t count = p.rows * p.groups;
  const int64_t step = kChunk / (p.cols + 1) + 1;
  team.for_chunks((count + step - 1) / step, [&](int64_t chunk) {
    const int64_t end = chunk * step + step < count ? chunk * step + step : count;
    for (int64_t i = chunk * step; i < end; ++i) {
      const int64_t row = i / p.groups, group = i % p.groups;
      convert_row<From, To>(p.x.template at<const typename From::Stored>(row, group),
                            p.out.template at<typename To::Stored>(row, group), p.cols, p.factor);
    }
  });
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
void run<Level::EFFINFER_LEVEL>(const ops::ConvertRowsProblem& p, Team& team) {
  with_float_elements(p.from, [&]<class From>() {
    with_float_elements(p.to, [&]<class To>() { EFFINFER_LEVEL::convert_rows<From, To>(p, team); });
  });
}

}  // namespace effinfer::cpu
