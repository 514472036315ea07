// The middle of a gated MLP: a row's first half through an activation, times its second half.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/dtype.h"
#include "effinfer/ops/elementwise.h"
#include "ops/cost.h"
#include "ops/rows.h"

namespace effinfer::ops {

// out = op(x[:cols]) * x[cols:].
struct GatedProblem {
  UnaryOp op = UnaryOp::none;  // an activation
  DType dtype = DType::f32;    // of x and out: f32, f16 or bf16
  ConstRows x;                 // vectors of 2 * cols
  int64_t rows = 0;
  int64_t groups = 1;
  int64_t cols = 0;
  Rows out;  // vectors of cols
};

std::string describe(const GatedProblem& problem);
const char* rejects(const GatedProblem& problem);
Cost cost(const GatedProblem& problem);

}  // namespace effinfer::ops
