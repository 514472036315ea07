// Numbers of any float type, and int8, told at run time, for kernels that memory bounds.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float16.h"
#include "core/float8.h"
#include "cuda/unit.h"
#include "effinfer/dtype.h"

namespace effinfer::cuda {

// The float of an 8- or 16-bit number's bits.
template <class Unit>
EFFINFER_DEVICE float float_of_bits(Unit& unit, DType dtype, uint32_t bits) {
  if (dtype == DType::i8) return static_cast<int8_t>(bits);
  if (dtype == DType::bf16) return bf16_to_f32(static_cast<uint16_t>(bits));
  // As halves, core/float8.h.
  float scale = 1.0f;
  if (dtype == DType::f8_e5m2) bits <<= 8;
  if (dtype == DType::f8_e4m3) {
    if ((bits & 0x7f) == 0x7f) return NAN;
    bits = (bits & 0x80) << 8 | (bits & 0x7f) << 7;
    scale = 256.0f;
  }
  return unit.from_f16(static_cast<uint16_t>(bits)) * scale;
}

// To nearest even, as bits; what is too large for 8 bits as core/float8.h has it.
template <class Unit>
EFFINFER_DEVICE uint32_t bits_of_float(Unit& unit, DType dtype, float x) {
  if (dtype == DType::f8_e4m3) return f32_to_f8_e4m3(x);
  if (dtype == DType::f8_e5m2) return f32_to_f8_e5m2(x);
  return (dtype == DType::f16 ? unit.f16x2(x, 0.0f) : unit.bf16x2(x, 0.0f)) & 0xffffu;
}

// The largest number of 8 bits in place of what is larger; NaN stays.
EFFINFER_DEVICE float saturated(DType dtype, float x) {
  if (dtype != DType::f8_e4m3 && dtype != DType::f8_e5m2) return x;
  const float most = dtype == DType::f8_e4m3 ? 448.0f : 57344.0f;
  if (x > most) return most;
  return x < -most ? -most : x;
}

// Number `i` of a row.
template <class Unit>
EFFINFER_DEVICE float read_float(Unit& unit, DType dtype, const void* row, int64_t i) {
  if (dtype == DType::f32) return unit.load(static_cast<const float*>(row) + i);
  if (dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2) {
    return float_of_bits(unit, dtype, unit.load(static_cast<const uint8_t*>(row) + i));
  }
  return float_of_bits(unit, dtype, unit.load(static_cast<const uint16_t*>(row) + i));
}

template <class Unit>
EFFINFER_DEVICE void write_float(Unit& unit, DType dtype, void* row, int64_t i, float x) {
  if (dtype == DType::f32) {
    static_cast<float*>(row)[i] = x;
  } else if (dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2) {
    static_cast<uint8_t*>(row)[i] = static_cast<uint8_t>(bits_of_float(unit, dtype, x));
  } else {
    static_cast<uint16_t*>(row)[i] = static_cast<uint16_t>(bits_of_float(unit, dtype, x));
  }
}

}  // namespace effinfer::cuda
