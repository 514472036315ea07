// Rows of floats of one type as those of another.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/dtype.h"
#include "ops/cost.h"
#include "ops/rows.h"

namespace effinfer::ops {

// out = x * factor over `cols` values of each group of a row: a float32 product, saturated where
// `out` has 8 bits, rounded to nearest even. Every element by itself: the same bits on any CPU.
struct ConvertRowsProblem {
  DType from = DType::f32;  // of x: f32, f16, bf16, f8_e4m3 or f8_e5m2
  DType to = DType::f32;    // of out: the same
  float factor = 1.0f;
  const float* divisor = nullptr;  // of GPUs: the factor is divided by it; null: by 1
  ConstRows x;
  Rows out;  // may alias x where the types have one size
  int64_t rows = 0;
  int64_t groups = 1;
  int64_t cols = 0;
};

std::string describe(const ConvertRowsProblem& problem);
const char* rejects(const ConvertRowsProblem& problem);
Cost cost(const ConvertRowsProblem& problem);

}  // namespace effinfer::ops
