// Comparing and picking lanes, for portable files.
#pragma once

#include <cstdint>

#include "cpu/vectors/math_portable.h"

namespace effinfer::cpu::portable {
namespace {

[[gnu::always_inline]] inline uint32_t move_mask(F32x4::Ints lanes) {
  const F32x4::Ints bits = lanes & F32x4::Ints{1, 2, 4, 8};
  return static_cast<uint32_t>((bits[0] | bits[1]) | (bits[2] | bits[3]));
}

// Bit i tells of lane i.
[[gnu::always_inline]] inline uint32_t bits_above(F32x4 a, F32x4 b) {
  return move_mask(a.v > b.v);
}
[[gnu::always_inline]] inline uint32_t bits_from(F32x4 a, F32x4 b) {
  return move_mask(a.v >= b.v);
}
[[gnu::always_inline]] inline uint32_t bits_nan(F32x4 a) {
  return move_mask(a.v != a.v);
}
// `value` in the lanes where a > b, else 0.
[[gnu::always_inline]] inline F32x4 where_above(F32x4 a, F32x4 b, F32x4 value) {
  return {a.v > b.v ? value.v : F32x4::Floats{}};
}

template <class T>
[[gnu::always_inline]] inline uint32_t bits_above(simd::Pair<T> a, simd::Pair<T> b) {
  return bits_above(a.low, b.low) | bits_above(a.high, b.high) << T::kWidth;
}
template <class T>
[[gnu::always_inline]] inline uint32_t bits_from(simd::Pair<T> a, simd::Pair<T> b) {
  return bits_from(a.low, b.low) | bits_from(a.high, b.high) << T::kWidth;
}
template <class T>
[[gnu::always_inline]] inline uint32_t bits_nan(simd::Pair<T> a) {
  return bits_nan(a.low) | bits_nan(a.high) << T::kWidth;
}
template <class T>
[[gnu::always_inline]] inline simd::Pair<T> where_above(simd::Pair<T> a, simd::Pair<T> b,
                                                        simd::Pair<T> value) {
  return {where_above(a.low, b.low, value.low), where_above(a.high, b.high, value.high)};
}

// Stores the lanes whose bits are set side by side; may write 16 lanes.
[[gnu::always_inline]] inline void compress(const F32x16& x, uint32_t bits, float* to) {
  float lanes[16];
  x.store(lanes);
  for (; bits != 0; bits &= bits - 1) *to++ = lanes[__builtin_ctz(bits)];
}
// Stores the lanes whose bits are set side by side, and their ids; may write 16 of each.
[[gnu::always_inline]] inline void compress(const F32x16& x, const int32_t* ids, uint32_t bits,
                                            float* to, int32_t* to_ids) {
  compress(x, bits, to);
  for (; bits != 0; bits &= bits - 1) *to_ids++ = ids[__builtin_ctz(bits)];
}
// Stores the lanes whose bits are set side by side, and ids, first + i of lane i; may write 16.
[[gnu::always_inline]] inline void compress(const F32x16& x, int32_t first, uint32_t bits,
                                            float* to, int32_t* to_ids) {
  compress(x, bits, to);
  for (; bits != 0; bits &= bits - 1) *to_ids++ = first + __builtin_ctz(bits);
}

// Sums of each lane in double precision.
struct LaneSums {
  double lanes[16];

  [[gnu::always_inline]] void add(const F32x16& x) {
    float values[16];
    x.store(values);
    for (int i = 0; i < 16; ++i) lanes[i] += static_cast<double>(values[i]);
  }
  [[gnu::always_inline]] void store(double* to) const { std::memcpy(to, lanes, sizeof(lanes)); }
};
[[gnu::always_inline]] inline LaneSums no_sums(const F32x16&) {
  return {};
}

}  // namespace
}  // namespace effinfer::cpu::portable
