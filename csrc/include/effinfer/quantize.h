// Weights to the types of GGUF files.
#pragma once

#include "effinfer/dtype.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"

namespace effinfer {

// How far a tensor's new values are from its old ones.
struct QuantizeError {
  double squared_error = 0;   // sum of squared differences; 0: the values are the same
  double squared_values = 0;  // sum of squares of the old values
};

// Whether quantize() writes this type: f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q4_k q5_k q6_k tq1_0
// tq2_0 i2_s.
EFFINFER_API bool can_quantize_to(DType dtype);

// Writes the values of `source`, of any weight type, as `target` to `out`: the bytes of a tensor of
// its shape. The same bytes with any number of threads.
//
// Block types: the least squared error that a search over scales finds; q8_0 by its largest value.
// Ternary types: a tensor whose values are 0 and +-s (for tq1_0 and tq2_0 with an s of each block)
// keeps them, as far as the type's scale can hold s; any other by its mean magnitude, that is
// round(w / mean|w|) limited to -1, 0, 1 (BitNet b1.58, arXiv:2402.17764, section 2).
//
// Throws InvalidArgument: a target that is not written, rows that are no whole blocks of it, values
// that are not finite or that it cannot hold, and for i2_s a tensor that is ternary with several
// scales.
EFFINFER_API QuantizeError quantize(const TensorView& source, DType target, ThreadPool& pool,
                                    void* out);

}  // namespace effinfer
