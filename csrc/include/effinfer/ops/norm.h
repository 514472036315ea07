// Normalisation of rows: RMS norm (Zhang and Sennrich, arXiv:1910.07467) and layer norm (Ba et al.,
// arXiv:1607.06450).
//
//   input, residual, out  float32, float16 or bfloat16 [..., D], D >= 1: one type, one shape,
//                         contiguous rows; leading dimensions with at most two different strides
//   weight, gemma, beta   [D], float32 or of the type of input
//
// Arithmetic is float32, rounded once at the end. A row's result is the same bits at every ISA
// level, in any batch and for any team. `out` may be input. Throws InvalidArgument for other
// dtypes, shapes and strides, and for an eps that is negative or not finite.
#pragma once

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

struct RmsNormOptions {
  float eps = 1e-6f;           // added to the mean of squares
  float weight_offset = 0.0f;  // added to the weights: 1 for Gemma's
};

// out = input / sqrt(mean(input^2) + eps) * (weight + weight_offset); no data: a weight of
// ones.
EFFINFER_API void rmsnorm(const StridedView& input, const TensorView& weight,
                          const RmsNormOptions& options, const StridedView& out,
                          const Executor& executor);

// residual = input + residual, input = rmsnorm(residual): in place, the norm of the unrounded sum.
EFFINFER_API void fused_add_rmsnorm(const StridedView& input, const StridedView& residual,
                                    const TensorView& weight, const RmsNormOptions& options,
                                    const Executor& executor);

// out = (input - mean) / sqrt(variance + eps) * gemma + beta, with the mean and the variance of a
// row. gemma and beta are of one type.
EFFINFER_API void layernorm(const StridedView& input, const TensorView& gemma,
                            const TensorView& beta, float eps, const StridedView& out,
                            const Executor& executor);

}  // namespace effinfer::ops
