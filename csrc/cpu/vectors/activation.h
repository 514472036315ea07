// The activations (effinfer/ops/elementwise.h) of vectors, each from vectors/math.h.
#pragma once

#include "cpu/vectors/float_vector.h"
#include "effinfer/ops/elementwise.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// visit(f) with f(x), the activation of a vector. Problems with another operator are rejected. The
// cases are all named so that the compiler finds the one that a new operator lacks.
template <class Visit>
[[gnu::always_inline]] inline void with_activation(ops::UnaryOp op, Visit&& visit) {
  using enum ops::UnaryOp;
  switch (op) {
    case silu:
      return visit([](F32x16 x) { return simd::silu(x); });
    case gelu:
      return visit([](F32x16 x) { return simd::gelu(x); });
    case gelu_tanh:
      return visit([](F32x16 x) { return simd::gelu_tanh(x); });
    case relu_squared:
      return visit([](F32x16 x) { return simd::relu_squared(x); });
    case sigmoid:
      return visit([](F32x16 x) { return simd::sigmoid(x); });
    case none:
    case scale:
    case softcap:
      return;
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
