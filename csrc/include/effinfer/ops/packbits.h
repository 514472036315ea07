// Booleans as bits: what attention masks travel as.
#pragma once

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

enum class BitOrder : uint8_t { big, little };  // the first element is the highest or lowest bit

// "big" or "little"; throws InvalidArgument otherwise.
EFFINFER_API BitOrder parse_bit_order(std::string_view text);

// out[S + 1] = where each packed segment starts: segments of x end at whole bytes. `indptr` int32
// or int64 [S + 1] ascends from 0 to `size`. Throws InvalidArgument otherwise.
EFFINFER_API void packed_indptr(const TensorView& indptr, int64_t size, int64_t* out);

// Bit i % 8 of byte out_indptr[s] + i / 8 says whether element indptr[s] + i of x (u8 [N]) is not
// zero; bits beyond a segment are zero. `out_indptr`, int64 [S + 1], as packed_indptr gives it, and
// out, u8 [out_indptr[S]], dense. On a GPU all of them lie there, and nobody looks at lists.
EFFINFER_API void packbits(const TensorView& x, const TensorView& indptr,
                           const TensorView& out_indptr, BitOrder order, const StridedView& out,
                           const Executor& executor);

}  // namespace effinfer::ops
