// Elementary functions of float vectors, written once for every ISA level: the same polynomials and
// the same order of operations; only levels without a fused multiply-add round differently.
//
// A vector type V has: load and store (of float, F16 or Bf16 elements; narrowing rounds to nearest
// even), set, + - * /, fma(a, b, c) = a * b + c, max and min (the second argument where either is
// a NaN), zero_below(limit, x, value) = 0 where x < limit, else value, abs, copysign(magnitude,
// sign), and power_of_two(x, t) = x * 2^n for the integer n that kRound shifted into the low bits
// of t. The vector types of an ISA file live in an anonymous namespace, which keeps these instances
// out of other files.
#pragma once

namespace effinfer::cpu::simd {

inline constexpr float kLog2e = 1.44269504f;
// ln 2 in two parts: n * kLn2High is exact for |n| < 2^11.
inline constexpr float kLn2High = 0x1.62e4p-1f;
inline constexpr float kLn2Low = 1.42860677e-6f;
// Adding 1.5 * 2^23 rounds to an integer (to nearest even) in the low bits of the mantissa.
inline constexpr float kRound = 12582912.0f;

// x = n * ln 2 + r with |r| <= ln 2 / 2, and e^r - 1 by a minimax polynomial of degree 6 (relative
// error of e^r below 2^-28).
template <class V>
struct ExpParts {
  V shifted;  // kRound + n
  V n;
  V expm1;  // e^r - 1
};

template <class V>
[[gnu::always_inline]] inline ExpParts<V> exp_parts(V x) {
  const V shifted = fma(x, V::set(kLog2e), V::set(kRound));
  const V n = shifted - V::set(kRound);
  V r = fma(n, V::set(-kLn2High), x);
  r = fma(n, V::set(-kLn2Low), r);
  V p = V::set(0.00138143206f);
  p = fma(p, r, V::set(0.00836885162f));
  p = fma(p, r, V::set(0.0416684002f));
  p = fma(p, r, V::set(0.166665196f));
  p = fma(p, r, V::set(0.49999994f));
  return {shifted, n, fma(p, r * r, r)};
}

// e^x within 1 ulp (2 without FMA); 0 below -104, infinity above 88.73, exp(0) = 1, NaN stays NaN.
template <class V>
[[gnu::always_inline]] inline V exp(V x) {
  // Beyond these the result is 0 or infinity anyway, and n stays within what power_of_two takes.
  x = max(V::set(-110.0f), x);
  x = min(V::set(100.0f), x);
  const ExpParts<V> parts = exp_parts(x);
  return power_of_two(parts.expm1 + V::set(1.0f), parts.shifted);
}

// 2^x within 1 ulp (2 without FMA), with fewer operations than exp: x - n is exact. 0 below -126:
// VSCALEFPS takes 260 cycles on Intel's cores where its result is subnormal or underflows. For x up
// to 127; 2^0 = 1, NaN stays NaN. The polynomial is that of e^r with r = x ln 2.
template <class V>
[[gnu::always_inline]] inline V exp2(V x) {
  const V least = V::set(-126.0f);
  const V exponent = max(least, x);
  const V shifted = exponent + V::set(kRound);
  const V r = exponent - (shifted - V::set(kRound));
  V p = V::set(0.000153208297f);
  p = fma(p, r, V::set(0.00133903883f));
  p = fma(p, r, V::set(0.00961852912f));
  p = fma(p, r, V::set(0.055503618f));
  p = fma(p, r, V::set(0.240226477f));
  p = fma(p, r, V::set(0.693147182f));
  return zero_below(least, x, power_of_two(fma(p, r, V::set(1.0f)), shifted));
}

// tanh(x) = (1 - e^-2|x|) / (1 + e^-2|x|), from e^y - 1 so that small x keep their precision.
template <class V>
[[gnu::always_inline]] inline V tanh(V x) {
  const V y = max(V::set(-40.0f), abs(x) * V::set(-2.0f));
  const ExpParts<V> parts = exp_parts(y);
  const V scale = power_of_two(V::set(1.0f), parts.shifted);
  const V expm1 = fma(parts.expm1, scale, scale - V::set(1.0f));
  return copysign(expm1 / (expm1 + V::set(2.0f)), x);
}

// 1 / (1 + e^-x) with a relative error below 3 * 2^-23: that of exp and of two roundings. 0 below
// -88.73, 1 above 16.7, NaN stays NaN.
template <class V>
[[gnu::always_inline]] inline V sigmoid(V x) {
  return V::set(1.0f) / (V::set(1.0f) + exp(V::set(0.0f) - x));
}

// x / (1 + e^-x)
template <class V>
[[gnu::always_inline]] inline V silu(V x) {
  return x / (V::set(1.0f) + exp(V::set(0.0f) - x));
}

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + e^-2u).
template <class V>
[[gnu::always_inline]] inline V gelu_tanh(V x) {
  const V cubic =
      fma(x * x, V::set(-2.0f * 0.7978845608f * 0.044715f), V::set(-2.0f * 0.7978845608f));
  return x / (V::set(1.0f) + exp(x * cubic));
}

// max(0, x)^2; NaN stays NaN.
template <class V>
[[gnu::always_inline]] inline V relu_squared(V x) {
  const V positive = max(V::set(0.0f), x);
  return positive * positive;
}

// x Phi(x) = x / 2 (1 + erf(x / sqrt(2))). With t = |x| / sqrt(2), h = erfc(t) / 2 is what Phi
// lacks of 0 or 1 on the side of x: e^(-t^2) q P(q) with q = 1 / (1 + 0.375 t), P a minimax
// polynomial (relative error below 2^-25 up to where h is 0).
template <class V>
[[gnu::always_inline]] inline V gelu(V x) {
  const V magnitude = min(V::set(40.0f), abs(x));
  const V q = V::set(1.0f) / fma(magnitude, V::set(0.26516504f), V::set(1.0f));
  V p = V::set(0.03049851395189762f);
  p = fma(p, q, V::set(-0.14238803088665009f));
  p = fma(p, q, V::set(0.21363936364650726f));
  p = fma(p, q, V::set(-0.11186406016349792f));
  p = fma(p, q, V::set(0.13495422899723053f));
  p = fma(p, q, V::set(0.06154358386993408f));
  p = fma(p, q, V::set(0.10245928913354874f));
  p = fma(p, q, V::set(0.10535190254449844f));
  p = fma(p, q, V::set(0.1058051735162735f));
  const V h = exp(magnitude * magnitude * V::set(-0.5f)) * (p * q);
  return max(V::set(0.0f), x) - magnitude * h;
}

// Two vectors as one of twice the width.
template <class T>
struct Pair {
  T low;
  T high;

  static constexpr int kWidth = 2 * T::kWidth;
  template <class Element>
  [[gnu::always_inline]] static Pair load(const Element* from) {
    return {T::load(from), T::load(from + T::kWidth)};
  }
  [[gnu::always_inline]] static Pair set(float value) { return {T::set(value), T::set(value)}; }
  template <class Element>
  [[gnu::always_inline]] void store(Element* to) const {
    low.store(to);
    high.store(to + T::kWidth);
  }
  [[gnu::always_inline]] friend Pair operator+(Pair a, Pair b) {
    return {a.low + b.low, a.high + b.high};
  }
  [[gnu::always_inline]] friend Pair operator-(Pair a, Pair b) {
    return {a.low - b.low, a.high - b.high};
  }
  [[gnu::always_inline]] friend Pair operator*(Pair a, Pair b) {
    return {a.low * b.low, a.high * b.high};
  }
  [[gnu::always_inline]] friend Pair operator/(Pair a, Pair b) {
    return {a.low / b.low, a.high / b.high};
  }
  [[gnu::always_inline]] friend Pair fma(Pair a, Pair b, Pair c) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
  }
  [[gnu::always_inline]] friend Pair max(Pair a, Pair b) {
    return {max(a.low, b.low), max(a.high, b.high)};
  }
  [[gnu::always_inline]] friend Pair min(Pair a, Pair b) {
    return {min(a.low, b.low), min(a.high, b.high)};
  }
  [[gnu::always_inline]] friend Pair keep(uint32_t bits, Pair x, Pair other) {
    return {keep(bits, x.low, other.low), keep(bits >> T::kWidth, x.high, other.high)};
  }
  [[gnu::always_inline]] friend Pair abs(Pair a) { return {abs(a.low), abs(a.high)}; }
  [[gnu::always_inline]] friend Pair copysign(Pair a, Pair b) {
    return {copysign(a.low, b.low), copysign(a.high, b.high)};
  }
  [[gnu::always_inline]] friend Pair zero_below(Pair limit, Pair x, Pair value) {
    return {zero_below(limit.low, x.low, value.low), zero_below(limit.high, x.high, value.high)};
  }
  [[gnu::always_inline]] friend Pair power_of_two(Pair x, Pair t) {
    return {power_of_two(x.low, t.low), power_of_two(x.high, t.high)};
  }
  // Sums and maxima over the lanes, halving the width each time: the same order at every level.
  [[gnu::always_inline]] friend float sum(Pair a) { return sum(a.low + a.high); }
  [[gnu::always_inline]] friend float maximum(Pair a) { return maximum(max(a.low, a.high)); }
};

}  // namespace effinfer::cpu::simd
