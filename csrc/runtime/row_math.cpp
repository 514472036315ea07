#include "runtime/row_math.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "effinfer/error.h"

namespace effinfer::runtime {
namespace {

constexpr size_t kLanes = 16;

// exp(x) = 2^n * e^r with n = round(x / ln 2) and |r| <= ln(2) / 2; ln 2 is split in two so that
// x - n ln 2 is exact to float (Cody and Waite 1980), e^r is its Taylor polynomial of degree 7
// (remainder below 2^-27).
inline float exp_lane(float x) {
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const bool in_range = x > -87.0f;
  x = in_range ? x : -87.0f;
  const float n = (x * 1.44269504f + kRound) - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float scale = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return in_range ? p * scale : 0.0f;
}

}  // namespace

float exp_nonpositive(float x) {
  return exp_lane(x);
}

float checked_max(std::span<const float> logits) {
  std::array<float, kLanes> high;
  std::array<int32_t, kLanes> nan{};
  high.fill(-std::numeric_limits<float>::infinity());
  const size_t whole = logits.size() / kLanes * kLanes;
  const float* x = logits.data();
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float value = x[i + lane];
      high[lane] = value > high[lane] ? value : high[lane];
      nan[lane] |= value != value;
    }
  }
  for (size_t i = whole; i < logits.size(); ++i) {
    high[0] = x[i] > high[0] ? x[i] : high[0];
    nan[0] |= x[i] != x[i];
  }
  for (const int32_t lane : nan) {
    if (lane != 0) throw InvalidArgument("[sampling] logits: expected numbers, got NaN");
  }
  const float max = *std::max_element(high.begin(), high.end());
  if (!std::isfinite(max)) {
    throw InvalidArgument("[sampling] logits: expected a finite maximum, got " +
                          std::to_string(max));
  }
  return max;
}

int32_t index_of(std::span<const float> values, float value) {
  return static_cast<int32_t>(std::find(values.begin(), values.end(), value) - values.begin());
}

void log_weights(std::span<const float> logits, float max, float temperature, float* out) {
  const float* x = logits.data();
  for (size_t i = 0; i < logits.size(); ++i) out[i] = (x[i] - max) / temperature;
}

double exp_sum(std::span<const float> x, float shift, float* out) {
  std::array<double, kLanes> sums{};
  std::array<float, kLanes> lanes;
  const size_t whole = x.size() / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = exp_lane(x[i + lane] - shift);
    }
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += static_cast<double>(lanes[lane]);
    if (out != nullptr) std::copy(lanes.begin(), lanes.end(), out + i);
  }
  for (size_t i = whole; i < x.size(); ++i) {
    const float value = exp_lane(x[i] - shift);
    sums[i - whole] += static_cast<double>(value);
    if (out != nullptr) out[i] = value;
  }
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace effinfer::runtime
