// The functions of one number, as ops/elementwise.h names them.
#pragma once

#include <cmath>

#include "cuda/unit.h"
#include "effinfer/ops/elementwise.h"

namespace effinfer::cuda {

EFFINFER_DEVICE float apply(ops::UnaryOp op, float x, float parameter) {
  switch (op) {
    case ops::UnaryOp::scale:
      return x * parameter;
    case ops::UnaryOp::softcap:
      return parameter * tanhf(x / parameter);
    case ops::UnaryOp::silu:
      return x / (1.0f + expf(-x));
    case ops::UnaryOp::gelu:
      return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case ops::UnaryOp::gelu_tanh:
      return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    case ops::UnaryOp::relu_squared:
      return x > 0.0f ? x * x : (x == x ? 0.0f : x);
    case ops::UnaryOp::sigmoid:
      return 1.0f / (1.0f + expf(-x));
    case ops::UnaryOp::none:
      break;
  }
  return x;
}

// Each of `x`, by one copy of the code of all functions, which is some hundred instructions.
// Registers have no index: the numbers come to the first one in turn.
template <int kCount>
EFFINFER_DEVICE void apply_each(ops::UnaryOp op, float (&x)[kCount], float parameter) {
  EFFINFER_NO_UNROLL
  for (int turn = 0; turn < kCount; ++turn) {
    const float y = apply(op, x[0], parameter);
    EFFINFER_UNROLL
    for (int i = 0; i + 1 < kCount; ++i) x[i] = x[i + 1];
    x[kCount - 1] = y;
  }
}

}  // namespace effinfer::cuda
