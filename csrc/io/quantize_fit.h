// Scales with little squared error. A scale is tried around the one that spans the values; with the
// integers that it gives, the scale of least squares is known in closed form.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/float16.h"

namespace effinfer::gguf {

// To the nearest integer, ties to even, for |x| < 2^22: two additions, which vectorise everywhere.
inline float nearest(float x) {
  constexpr float kShift = 0x1.8p23f;
  return (x + kShift) - kShift;
}

// Limited to [low, high]; NaN gives low.
inline float limit(float x, float low, float high) {
  return std::min(high, std::max(low, x));
}

inline float rounded_to_f16(float x) {
  return f16_to_f32(f32_to_f16(x));
}

inline float inverse(float x) {
  return x == 0.0f ? 0.0f : 1.0f / x;
}

// w = scale * q + offset
struct Affine {
  float scale = 0;
  float offset = 0;
};

// Of what a grid of candidates widens or narrows the span of the values, in steps of q.
inline constexpr float kFirstStep = -1.0f;
inline constexpr float kStep = 0.2f;
inline constexpr int kSteps = 15;

// The best w = scale * q + offset with q in [0, max]. With `below`, the offset is at most 0.
template <int count, int max, bool below>
Affine fit_affine(const float* w) {
  float low = below ? std::min(w[0], 0.0f) : w[0];
  float high = w[0];
  for (int i = 1; i < count; ++i) {
    low = std::min(low, w[i]);
    high = std::max(high, w[i]);
  }
  if (!(high > low)) return {0.0f, low};
  // Of values y = w - low, which start at 0: the sums stay small next to what they measure.
  float y[count];
  float sum_y = 0;
  for (int i = 0; i < count; ++i) {
    y[i] = w[i] - low;
    sum_y += y[i];
  }
  Affine best{(high - low) / max, 0.0f};
  double best_gain = -1;
  const auto attempt = [&](float inv, float shift) {
    float sum_q = 0;
    float sum_qq = 0;
    float sum_yq = 0;
    for (int i = 0; i < count; ++i) {
      const float q = limit(nearest((y[i] - shift) * inv), 0.0f, max);
      sum_q += q;
      sum_qq += q * q;
      sum_yq += y[i] * q;
    }
    const double determinant = double{count} * sum_qq - double{sum_q} * sum_q;
    if (determinant <= 0) return;
    double scale = (double{count} * sum_yq - double{sum_q} * sum_y) / determinant;
    double offset = (double{sum_y} - scale * sum_q) / count;
    if (below && offset > -low) {
      offset = -low;
      scale = (double{sum_yq} - offset * sum_q) / sum_qq;
    }
    // By how much the squared error is below the sum of y^2.
    const double gain = scale * (2 * double{sum_yq} - scale * sum_qq - 2 * offset * sum_q) +
                        offset * (2 * double{sum_y} - count * offset);
    if (scale > 0 && gain > best_gain) {
      best_gain = gain;
      best = {static_cast<float>(scale), static_cast<float>(offset)};
    }
  };
  for (int step = 0; step < kSteps; ++step) {
    const float span = static_cast<float>(max) + kFirstStep + kStep * static_cast<float>(step);
    attempt(span / (high - low), 0.0f);
  }
  attempt(inverse(best.scale), best.offset);
  return {best.scale, best.offset + low};
}

// The best w = scale * q with q in [-half, half - 1]; the value of largest magnitude is on the side
// that has one more step.
template <int count, int half>
float fit_symmetric(const float* w) {
  float extreme = 0;
  for (int i = 0; i < count; ++i) {
    if (std::abs(w[i]) > std::abs(extreme)) extreme = w[i];
  }
  if (extreme == 0.0f) return 0.0f;
  float best = extreme / -half;
  double best_gain = -1;
  for (int step = 0; step < kSteps; ++step) {
    const float inv =
        -(static_cast<float>(half) + kFirstStep + kStep * static_cast<float>(step)) / extreme;
    float sum_qq = 0;
    float sum_wq = 0;
    for (int i = 0; i < count; ++i) {
      const float q = limit(nearest(w[i] * inv), -half, half - 1);
      sum_qq += q * q;
      sum_wq += w[i] * q;
    }
    if (sum_qq == 0.0f) continue;
    const double gain = double{sum_wq} * sum_wq / sum_qq;
    if (gain > best_gain) {
      best_gain = gain;
      best = sum_wq / sum_qq;
    }
  }
  return best;
}

}  // namespace effinfer::gguf
