// Numbers of one float type as those of another, times a factor: what quantisation to 8-bit floats
// is, and widening before arithmetic in float32.
#pragma once

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

// What messages call the operator and its tensors.
struct ConvertNames {
  const char* op = "convert_rows";
  const char* x = "x";
  const char* out = "out";
};

// out = x * factor, a float32 product, rounded to nearest even. What an 8-bit float cannot hold
// becomes its largest finite number (448 of e4m3, 57344 of e5m2), of either sign; NaN stays NaN.
//
//   x, out  floats of 32, 16 or 8 bits [..., D]: one shape, contiguous rows; leading dimensions
//           with at most two different strides
//   divisor float32, one number, or of rank 0: the factor is divided by it. On a GPU nobody looks
//           at it before the kernel does
//
// Throws InvalidArgument for other dtypes, shapes and strides, and for a factor that is not finite.
EFFINFER_API void convert_rows(const StridedView& x, float factor, const StridedView& out,
                               const Executor& executor, const ConvertNames& names = {},
                               const TensorView& divisor = {});

}  // namespace effinfer::ops
