// Looking rows up: token embeddings from a table of any weight type, and rows of activations.
#pragma once

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

// out[t] = scale * table[ids[t]].
//   ids    int32 [T], each in [0, V)
//   table  [V, D] in f32, f16, bf16 or a quantised type; D a whole number of its blocks
//   out    float32 [T, D]
// Throws InvalidArgument for other shapes and dtypes and for an id out of range, naming its place.
EFFINFER_API void embedding(const TensorView& ids, const TensorView& table, float scale, float* out,
                            const Executor& executor);

// out[i] = x[rows[i]]: x float32 [N, D], rows int32 [R] in [0, N), out float32 [R, D]. Throws
// InvalidArgument as embedding does.
EFFINFER_API void select_rows(const TensorView& x, const TensorView& rows, float* out,
                              const Executor& executor);

// Rows of a GPU's array as they are, one after the other: out[i] = x[rows[i]], x [N, H, D] of any
// dtype, whose rows begin at multiples of 16 bytes, rows int32 [R] in [0, N) of the host, out
// [R, H, D]. Throws InvalidArgument as embedding does, and for an x of 2^31 of the pieces that
// divide its rows and strides or more: at least 32 GB where these have 16 bytes.
EFFINFER_API void take_rows(const StridedView& x, const TensorView& rows, void* out, Queue& queue);

}  // namespace effinfer::ops
