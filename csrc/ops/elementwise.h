// Operators of one or two arrays, element by element.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/ops/elementwise.h"
#include "ops/cost.h"

namespace effinfer::ops {

// out = op(x).
struct UnaryProblem {
  UnaryOp op = UnaryOp::none;
  float parameter = 1.0f;    // names(op).parameter
  const float* x = nullptr;  // [rows, cols] with x_stride
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t x_stride = 0;
  float* out = nullptr;  // [rows, cols] with out_stride; may alias x
  int64_t out_stride = 0;
};

struct BinaryProblem {
  BinaryOp op = BinaryOp::add;
  const float* a = nullptr;  // [size]
  const float* b = nullptr;
  int64_t size = 0;
  float* out = nullptr;  // may alias a or b
};

std::string describe(const UnaryProblem& problem);
std::string describe(const BinaryProblem& problem);
const char* rejects(const UnaryProblem& problem);
Cost cost(const UnaryProblem& problem);
Cost cost(const BinaryProblem& problem);

}  // namespace effinfer::ops
