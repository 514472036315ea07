// The middle of a gated MLP (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202):
// out = f(input[..., :D]) * input[..., D:].
//
//   input  float32, float16 or bfloat16 [..., 2 D], contiguous rows; leading dimensions with at
//          most two different strides
//   out    [..., D] of the type of input
//
// Arithmetic is float32, rounded once at the end. Throws InvalidArgument for other dtypes, shapes
// and strides.
#pragma once

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

// f(x) = x * sigmoid(x)
EFFINFER_API void silu_and_mul(const StridedView& input, const StridedView& out,
                               const Executor& executor);
// f(x) = x / 2 * (1 + erf(x / sqrt(2)))
EFFINFER_API void gelu_and_mul(const StridedView& input, const StridedView& out,
                               const Executor& executor);
// f(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
EFFINFER_API void gelu_tanh_and_mul(const StridedView& input, const StridedView& out,
                                    const Executor& executor);

}  // namespace effinfer::ops
