// Scales with little squared error. A scale is tried around the one that spans the values; with the
// integers that it gives, the scale of least squares is known in closed form.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/float16.h"

namespace effinfer::gguf {

// Four floats, with the operators of float: sums come in four strands, the same on every machine.
using Lanes [[gnu::vector_size(16)]] = float;

inline Lanes load(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

inline float sum(Lanes x) {
  return (x[0] + x[2]) + (x[1] + x[3]);
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22.
template <class T>
inline T nearest(T x) {
  constexpr float kShift = 0x1.8p23f;
  return (x + kShift) - kShift;
}

// Limited to [low, high]; NaN gives low.
inline float limit(float x, float low, float high) {
  return std::min(high, std::max(low, x));
}
inline Lanes limit(Lanes x, float low, float high) {
  const Lanes above = low < x ? x : Lanes{} + low;
  return above < high ? above : Lanes{} + high;
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

// A grid of candidates widens or narrows the span of the values by these, in steps of q.
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
  // Sums are of values y = w - low, which start at 0: they stay small next to what they measure.
  float y[count];
  float sum_y = 0;
  for (int i = 0; i < count; ++i) {
    y[i] = w[i] - low;
    sum_y += y[i];
  }
  Affine best{(high - low) / max, 0.0f};
  double best_gain = -1;
  const auto attempt = [&](float inv, float shift) {
    Lanes q_lanes{};
    Lanes qq_lanes{};
    Lanes yq_lanes{};
    for (int i = 0; i < count; i += 4) {
      const Lanes value = load(y + i);
      const Lanes q = limit(nearest((value - shift) * inv), 0.0f, max);
      q_lanes += q;
      qq_lanes += q * q;
      yq_lanes += value * q;
    }
    const float sum_q = sum(q_lanes);
    const float sum_qq = sum(qq_lanes);
    const float sum_yq = sum(yq_lanes);
    const double determinant = double{count} * sum_qq - double{sum_q} * sum_q;
    if (determinant <= 0) return;
    double scale = (double{count} * sum_yq - double{sum_q} * sum_y) / determinant;
    double offset = (double{sum_y} - scale * sum_q) / count;
    if (below && offset > -low) {
      offset = -low;
      scale = (double{sum_yq} - offset * sum_q) / sum_qq;
    }
    // The gain is how much the squared error is below the sum of y^2.
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
    Lanes qq_lanes{};
    Lanes wq_lanes{};
    for (int i = 0; i < count; i += 4) {
      const Lanes value = load(w + i);
      const Lanes q = limit(nearest(value * inv), -half, half - 1);
      qq_lanes += q * q;
      wq_lanes += value * q;
    }
    const float sum_qq = sum(qq_lanes);
    const float sum_wq = sum(wq_lanes);
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
