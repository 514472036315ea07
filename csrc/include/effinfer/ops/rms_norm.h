// Root mean square layer normalisation (Zhang and Sennrich, arXiv:1910.07467).
#pragma once

#include "effinfer/export.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"

namespace effinfer::ops {

struct RmsNormOptions {
  float eps = 1e-6f;   // added to the mean of squares
  int64_t groups = 1;  // each row is `groups` vectors normalised by themselves: heads of a q/k norm
};

// y = x / sqrt(mean(x^2) + eps) * weight over each group of a row.
//   x       float32 [..., groups * D]
//   weight  float32 [D], or a view without data: ones
//   out     as x; may be x
// A row's result is the same bits at every ISA level, in any batch and for any team. Throws
// InvalidArgument for other dtypes and shapes, groups < 1, a negative or non-finite eps.
EFFINFER_API void rms_norm(const TensorView& x, const TensorView& weight,
                           const RmsNormOptions& options, float* out, ThreadPool& pool);

// The same after a residual addition: sum = x + residual, y = rms_norm(sum). `sum` and `out` are as
// x; `sum` may be x or residual.
EFFINFER_API void add_rms_norm(const TensorView& x, const TensorView& residual,
                               const TensorView& weight, const RmsNormOptions& options, float* sum,
                               float* out, ThreadPool& pool);

}  // namespace effinfer::ops
