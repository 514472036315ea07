// The vector types of portable files (four lanes of the compiler's own vectors, which become SSE2
// or NEON), and elementary functions of one float.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "core/float16.h"
#include "cpu/vectors/math.h"

namespace effinfer::cpu::portable {
namespace {

struct F32x4 {
  using Floats = float __attribute__((vector_size(16)));
  using Ints = int32_t __attribute__((vector_size(16)));
  using Halves = uint16_t __attribute__((vector_size(8)));
  Floats v;

  static constexpr int kWidth = 4;
  [[gnu::always_inline]] static F32x4 load(const float* from) {
    F32x4 out;
    std::memcpy(&out.v, from, sizeof(out.v));
    return out;
  }
  [[gnu::always_inline]] static F32x4 load(const F16* from) {
    return {Floats{f16_to_f32(from[0].bits), f16_to_f32(from[1].bits), f16_to_f32(from[2].bits),
                   f16_to_f32(from[3].bits)}};
  }
  [[gnu::always_inline]] static F32x4 load(const Bf16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    return {std::bit_cast<Floats>(__builtin_convertvector(halves, Ints) << 16)};
  }
  [[gnu::always_inline]] static F32x4 set(float value) {
    return {Floats{value, value, value, value}};
  }
  [[gnu::always_inline]] void store(float* to) const { std::memcpy(to, &v, sizeof(v)); }
  [[gnu::always_inline]] void store(F16* to) const {
    for (int i = 0; i < kWidth; ++i) to[i].bits = f32_to_f16(v[i]);
  }
  // Rounds as f32_to_bf16 does.
  [[gnu::always_inline]] void store(Bf16* to) const {
    const Ints bits = std::bit_cast<Ints>(v);
    const Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Ints chosen = v == v ? rounded : (bits | 0x400000);
    const Halves halves = __builtin_convertvector(chosen >> 16, Halves);
    std::memcpy(to, &halves, sizeof(halves));
  }
  [[gnu::always_inline]] friend F32x4 operator+(F32x4 a, F32x4 b) { return {a.v + b.v}; }
  [[gnu::always_inline]] friend F32x4 operator-(F32x4 a, F32x4 b) { return {a.v - b.v}; }
  [[gnu::always_inline]] friend F32x4 operator*(F32x4 a, F32x4 b) { return {a.v * b.v}; }
  [[gnu::always_inline]] friend F32x4 operator/(F32x4 a, F32x4 b) { return {a.v / b.v}; }
  [[gnu::always_inline]] friend F32x4 fma(F32x4 a, F32x4 b, F32x4 c) { return {a.v * b.v + c.v}; }
  [[gnu::always_inline]] friend F32x4 max(F32x4 a, F32x4 b) { return {a.v > b.v ? a.v : b.v}; }
  [[gnu::always_inline]] friend F32x4 min(F32x4 a, F32x4 b) { return {a.v < b.v ? a.v : b.v}; }
  // Lane i of x where bit i is set, else `other`.
  [[gnu::always_inline]] friend F32x4 keep(uint32_t bits, F32x4 x, F32x4 other) {
    const Ints set = static_cast<int32_t>(bits) & Ints{1, 2, 4, 8};
    return {set != 0 ? x.v : other.v};
  }
  [[gnu::always_inline]] friend F32x4 abs(F32x4 a) {
    return {std::bit_cast<Floats>(std::bit_cast<Ints>(a.v) & 0x7fffffff)};
  }
  [[gnu::always_inline]] friend F32x4 copysign(F32x4 a, F32x4 b) {
    const Ints sign = std::bit_cast<Ints>(b.v) & INT32_MIN;
    return {std::bit_cast<Floats>(std::bit_cast<Ints>(abs(a).v) | sign)};
  }
  [[gnu::always_inline]] friend F32x4 zero_below(F32x4 limit, F32x4 x, F32x4 value) {
    return {x.v < limit.v ? Floats{} : value.v};
  }
  // Multiplies by two factors: n may exceed the exponents of a float by half.
  [[gnu::always_inline]] friend F32x4 power_of_two(F32x4 x, F32x4 t) {
    const Ints n = std::bit_cast<Ints>(t.v) - std::bit_cast<int32_t>(simd::kRound);
    const Ints first = n >> 1;
    const Ints second = n - first;
    const Floats a = std::bit_cast<Floats>((first + 127) << 23);
    const Floats b = std::bit_cast<Floats>((second + 127) << 23);
    return {x.v * a * b};
  }
  [[gnu::always_inline]] friend float sum(F32x4 a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
  [[gnu::always_inline]] friend float maximum(F32x4 a) {
    const float even = a.v[0] > a.v[2] ? a.v[0] : a.v[2];
    const float odd = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
    return even > odd ? even : odd;
  }
};

using F32x16 = simd::Pair<simd::Pair<F32x4>>;

// The greatest of the lanes' bits without the sign: magnitudes order like them, infinities and NaNs
// come last.
[[gnu::always_inline]] inline int32_t largest_magnitude(const F32x16& x) {
  int32_t lanes[16];
  abs(x).store(reinterpret_cast<float*>(lanes));
  int32_t most = 0;
  for (const int32_t lane : lanes) most = lane > most ? lane : most;
  return most;
}

// Stores lanes within +-127 as the nearest integers, ties to even; returns their sum.
[[gnu::always_inline]] inline int32_t store_int8(const F32x16& x, int8_t* to) {
  float shifted[16];
  (x + F32x16::set(simd::kRound)).store(shifted);
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    const int32_t q = std::bit_cast<int32_t>(shifted[i]) - std::bit_cast<int32_t>(simd::kRound);
    to[i] = static_cast<int8_t>(q);
    sum += q;
  }
  return sum;
}

// Stores lanes within +-32767 as the nearest integers, ties to even.
[[gnu::always_inline]] inline void store_int16(const F32x16& x, int16_t* to) {
  float shifted[16];
  (x + F32x16::set(simd::kRound)).store(shifted);
  for (int i = 0; i < 16; ++i) {
    to[i] = static_cast<int16_t>(std::bit_cast<int32_t>(shifted[i]) -
                                 std::bit_cast<int32_t>(simd::kRound));
  }
}

[[gnu::always_inline]] inline float vexp(float x) {
  return simd::exp(F32x4::set(x)).v[0];
}
[[gnu::always_inline]] inline float vtanh(float x) {
  return simd::tanh(F32x4::set(x)).v[0];
}
[[gnu::always_inline]] inline float vsilu(float x) {
  return simd::silu(F32x4::set(x)).v[0];
}
[[gnu::always_inline]] inline float vgelu_tanh(float x) {
  return simd::gelu_tanh(F32x4::set(x)).v[0];
}

}  // namespace
}  // namespace effinfer::cpu::portable
