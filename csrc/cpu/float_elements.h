// Elements of any float type as float32, a type known at compile time for each loop.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "core/float8.h"
#include "effinfer/dtype.h"

namespace effinfer::cpu {

// What a dtype's elements are stored as, and their conversions: widening is exact, narrowing rounds
// to nearest even.
template <DType kDType>
struct FloatElement;

template <>
struct FloatElement<DType::f32> {
  using Stored = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};
template <>
struct FloatElement<DType::f16> {
  using Stored = uint16_t;
  static float load(uint16_t x) { return f16_to_f32(x); }
  static uint16_t store(float x) { return f32_to_f16(x); }
};
template <>
struct FloatElement<DType::bf16> {
  using Stored = uint16_t;
  static float load(uint16_t x) { return bf16_to_f32(x); }
  static uint16_t store(float x) { return f32_to_bf16(x); }
};
template <>
struct FloatElement<DType::f8_e4m3> {
  using Stored = uint8_t;
  static float load(uint8_t x) { return f8_e4m3_to_f32(x); }
  static uint8_t store(float x) { return f32_to_f8_e4m3(x); }
};
template <>
struct FloatElement<DType::f8_e5m2> {
  using Stored = uint8_t;
  static float load(uint8_t x) { return f8_e5m2_to_f32(x); }
  static uint8_t store(float x) { return f32_to_f8_e5m2(x); }
};

// visit.operator()<Element>() with the elements of rows of vectors: f32, f16 or bf16.
template <class Visit>
decltype(auto) with_row_elements(DType dtype, Visit&& visit) {
  if (dtype == DType::f16) return visit.template operator()<FloatElement<DType::f16>>();
  if (dtype == DType::bf16) return visit.template operator()<FloatElement<DType::bf16>>();
  return visit.template operator()<FloatElement<DType::f32>>();
}

// The same with those of 8 bits.
template <class Visit>
decltype(auto) with_float_elements(DType dtype, Visit&& visit) {
  if (dtype == DType::f8_e4m3) return visit.template operator()<FloatElement<DType::f8_e4m3>>();
  if (dtype == DType::f8_e5m2) return visit.template operator()<FloatElement<DType::f8_e5m2>>();
  return with_row_elements(dtype, visit);
}

}  // namespace effinfer::cpu
