// 16 floats in plain C++: the model of the lanes_*.h interface that kernel bodies are written in.
// Every operation but the functions of math_*.h is one correctly rounded float operation a lane, so
// bodies that use no other give the same bits at every ISA level.
#pragma once

#include <cmath>

#include "effinfer/device.h"

namespace effinfer::cpu::portable {
namespace {

struct Lanes {
  static constexpr Isa kIsa = Isa::portable;
  float v[16];

  template <class F>
  static Lanes each(F&& f) {
    Lanes r;
    for (int i = 0; i < 16; ++i) r.v[i] = f(i);
    return r;
  }
  static Lanes all(float value) {
    return each([&](int) { return value; });
  }
  static Lanes load(const float* p) {
    return each([&](int i) { return p[i]; });
  }
  void store(float* p) const {
    for (int i = 0; i < 16; ++i) p[i] = v[i];
  }

  friend Lanes operator+(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  friend Lanes operator-(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  friend Lanes operator*(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  friend Lanes operator/(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }

  // max(x, 0); a NaN stays a NaN.
  Lanes relu() const {
    return each([&](int i) { return v[i] < 0.0f ? 0.0f : v[i]; });
  }
  Lanes tanh() const {
    return each([&](int i) { return std::tanh(v[i]); });
  }
  Lanes silu() const {
    return each([&](int i) { return v[i] / (1.0f + std::exp(-v[i])); });
  }
  Lanes gelu_tanh() const {
    return each([&](int i) {
      const float x = v[i];
      return 0.5f * x * (1.0f + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    });
  }

  // The sum of the lanes as a tree: 8 apart, 4 apart, 2 apart, neighbours.
  float sum() const {
    float s[8];
    for (int i = 0; i < 8; ++i) s[i] = v[i] + v[i + 8];
    for (int i = 0; i < 4; ++i) s[i] += s[i + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
  }

  // Of 32 floats: the even ones and the odd ones, and the reverse.
  static void load_pairs(const float* p, Lanes& even, Lanes& odd) {
    even = each([&](int i) { return p[2 * i]; });
    odd = each([&](int i) { return p[2 * i + 1]; });
  }
  static void store_pairs(float* p, const Lanes& even, const Lanes& odd) {
    for (int i = 0; i < 16; ++i) {
      p[2 * i] = even.v[i];
      p[2 * i + 1] = odd.v[i];
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::portable
