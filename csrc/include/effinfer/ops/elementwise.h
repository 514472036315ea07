// The element-by-element operators: float32 in, float32 out, any shape. `out` has the shape of the
// inputs and may be one of them. Throws InvalidArgument for another dtype or unequal shapes.
#pragma once

#include "effinfer/export.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"

namespace effinfer::ops {

// x * sigmoid(x) (Elfwing et al., arXiv:1702.03118).
EFFINFER_API void silu(const TensorView& x, float* out, ThreadPool& pool);
// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel, arXiv:1606.08415).
EFFINFER_API void gelu_tanh(const TensorView& x, float* out, ThreadPool& pool);
// max(x, 0)^2 (So et al., "Primer", arXiv:2109.08668).
EFFINFER_API void relu_squared(const TensorView& x, float* out, ThreadPool& pool);
// cap * tanh(x / cap), cap > 0 (Gemma 2, arXiv:2408.00118, section 2).
EFFINFER_API void softcap(const TensorView& x, float cap, float* out, ThreadPool& pool);
EFFINFER_API void scale(const TensorView& x, float factor, float* out, ThreadPool& pool);

EFFINFER_API void add(const TensorView& a, const TensorView& b, float* out, ThreadPool& pool);
EFFINFER_API void mul(const TensorView& a, const TensorView& b, float* out, ThreadPool& pool);

}  // namespace effinfer::ops
