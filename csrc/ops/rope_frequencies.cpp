#include <algorithm>
#include <cmath>
#include <numbers>

#include "ops/elementwise.h"

namespace effinfer::ops {
namespace {

// theta^(2i / dims) rounded once from double: what a float32 pow aims at.
float position_period(const RopeParameters& p, int32_t i) {
  const float exponent = static_cast<float>(2 * i) / static_cast<float>(p.dims);
  return static_cast<float>(std::pow(static_cast<double>(p.theta), static_cast<double>(exponent)));
}

// The reference divides a number by a tensor, which torch computes as reciprocal times number; the
// ramp subtracts nearly equal numbers, so the same roundings matter.
float llama3(const RopeParameters& p, float inv_freq) {
  const float wavelength = 1.0f / inv_freq * (2.0f * std::numbers::pi_v<float>);
  if (wavelength < p.original_max_position / p.high_freq_factor) return inv_freq;
  if (wavelength > p.original_max_position / p.low_freq_factor) return inv_freq / p.factor;
  const float smooth = (1.0f / wavelength * p.original_max_position - p.low_freq_factor) /
                       (p.high_freq_factor - p.low_freq_factor);
  return (1.0f - smooth) * inv_freq / p.factor + smooth * inv_freq;
}

// The (fractional) pair of dimensions that turns `rotations` times within the original context.
double correction_dim(const RopeParameters& p, double rotations) {
  return p.dims *
         std::log(static_cast<double>(p.original_max_position) /
                  (rotations * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(static_cast<double>(p.theta)));
}

void yarn(const RopeParameters& p, float* inv_freq) {
  const double low = std::max(std::floor(correction_dim(p, p.beta_fast)), 0.0);
  double high = std::min(std::ceil(correction_dim(p, p.beta_slow)), p.dims - 1.0);
  if (low == high) high += 0.001;
  const float width = static_cast<float>(high - low);
  for (int32_t i = 0; i < p.dims / 2; ++i) {
    const float ramp = (static_cast<float>(i) - static_cast<float>(low)) / width;
    const float keep = 1.0f - std::clamp(ramp, 0.0f, 1.0f);
    const float period = position_period(p, i);
    inv_freq[i] = 1.0f / (p.factor * period) * (1.0f - keep) + 1.0f / period * keep;
  }
}

float yarn_attention_factor(const RopeParameters& p) {
  if (p.attention_factor != 0.0f) return p.attention_factor;
  if (p.factor <= 1.0f) return 1.0f;
  return static_cast<float>(0.1 * std::log(static_cast<double>(p.factor)) + 1.0);
}

}  // namespace

float rope_inv_freq(const RopeParameters& parameters, const float* divisors, float* inv_freq) {
  const int32_t half = parameters.dims / 2;
  for (int32_t i = 0; i < half; ++i) inv_freq[i] = 1.0f / position_period(parameters, i);
  float factor = 1.0f;
  switch (parameters.scaling) {
    case RopeScaling::none:
      break;
    case RopeScaling::linear:
      for (int32_t i = 0; i < half; ++i) inv_freq[i] /= parameters.factor;
      break;
    case RopeScaling::llama3:
      for (int32_t i = 0; i < half; ++i) inv_freq[i] = llama3(parameters, inv_freq[i]);
      break;
    case RopeScaling::yarn:
      yarn(parameters, inv_freq);
      factor = yarn_attention_factor(parameters);
      break;
  }
  if (divisors != nullptr) {
    for (int32_t i = 0; i < half; ++i) inv_freq[i] /= divisors[i];
  }
  return factor;
}

}  // namespace effinfer::ops
