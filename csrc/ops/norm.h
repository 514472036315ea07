// RMS norm and layer norm of rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "effinfer/dtype.h"
#include "ops/cost.h"
#include "ops/operand.h"
#include "ops/rows.h"

namespace effinfer::ops {

// RMS norm over each group of `cols` values of a row: y = x / sqrt(mean(x^2) + eps) * weight.
// With `add_to`: the row first becomes x + add_to's row, and the sum is written back to `sum_out`
// (fused residual add). The result goes to `out` as floats or to `out_operand` as a matmul operand.
// The mean is accumulated in a fixed order (16 float lanes, then a fixed tree): the same bits at
// every ISA level and team size.
struct RmsNormProblem {
  DType dtype = DType::f32;  // of x, add_to, sum_out and out: f32, f16 or bf16
  ConstRows x;
  int64_t rows = 0;
  int64_t groups = 1;  // heads, for q/k norm; 1 otherwise
  int64_t cols = 0;
  DType weight_dtype = DType::f32;  // f32, or dtype
  const void* weight = nullptr;     // [cols]; null: ones
  bool weight_is_fixed = false;     // no kernel writes it: a GPU may read it ahead of its turn
  float weight_offset = 0.0f;       // added to the weights: 1 in Gemma's files
  float eps = 1e-6f;
  ConstRows add_to;     // no data: none
  Rows sum_out;         // may alias x or add_to
  Rows out;             // may alias x
  Operand out_operand;  // groups == 1 only
};

// y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, in the same fixed order.
struct LayerNormProblem {
  DType dtype = DType::f32;  // of x and out: f32, f16 or bf16
  ConstRows x;
  int64_t rows = 0;
  int64_t groups = 1;
  int64_t cols = 0;
  DType weight_dtype = DType::f32;  // of weight and bias: f32, or dtype
  const void* weight = nullptr;     // [cols]
  const void* bias = nullptr;       // [cols]
  float eps = 1e-6f;
  Rows out;  // may alias x
};

std::string describe(const RmsNormProblem& problem);
std::string describe(const LayerNormProblem& problem);
const char* rejects(const RmsNormProblem& problem);
const char* rejects(const LayerNormProblem& problem);
size_t scratch_bytes(const RmsNormProblem& problem);  // a row on its way into a matmul operand
Cost cost(const RmsNormProblem& problem);
Cost cost(const LayerNormProblem& problem);

}  // namespace effinfer::ops
