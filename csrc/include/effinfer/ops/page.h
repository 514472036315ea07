// Writing keys and values to the pages of a cache that the caller owns, with FlashInfer's layouts
// and lists. (ops/paged_kv.h has the pages in the order of the engine's own kernels.)
#pragma once

#include <cstdint>

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/ops/kv_order.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

// Where each new row goes: token `positions[i]` of sequence `batch_indices[i]`, whose pages are
// kv_indices[kv_indptr[b] : kv_indptr[b + 1]]. All int32.
struct AppendPlaces {
  TensorView batch_indices;  // [N], in [0, B)
  TensorView positions;      // [N], in [0, length of the sequence)
  TensorView kv_indices;     // [kv_indptr[B] or more], in [0, P)
  TensorView kv_indptr;      // [B + 1], from 0, never decreasing
  TensorView
      kv_last_page_len;  // [B], tokens in the last page, 1 to page_size; the new ones included
};

// Rows [N, H, D] and the pages that they go to: any strides with a contiguous last dimension.
struct AppendTensors {
  StridedView rows;
  StridedView cache;
};

// Row i of append_indptr[b] <= i < append_indptr[b + 1] becomes one of the last tokens of sequence
// b, which has seq_lens[b] of them then: its entries of batch_indices and positions, which have as
// many values or more; those behind the last row are -1 and 0. All int32. Throws InvalidArgument.
EFFINFER_API void batch_indices_positions(const TensorView& append_indptr,
                                          const TensorView& seq_lens,
                                          const StridedView& batch_indices,
                                          const StridedView& positions, const Executor& executor);

// Tokens of each sequence: max(pages - 1, 0) * page_size + kv_last_page_len. All int32 [B].
EFFINFER_API void page_lengths(const TensorView& kv_indptr, const TensorView& kv_last_page_len,
                               int32_t page_size, const StridedView& out, const Executor& executor);

// What messages call the operator and its arguments.
struct AppendNames {
  const char* op = "append_paged_kv_cache";
  const char* key = "append_key";
  const char* value = "append_value";
  const char* k_cache = "k_cache";
  const char* v_cache = "v_cache";
};

// Copies rows to their places. Dtypes of rows and pages are the same, or both floats of 32, 16 or 8
// bits: then values are rounded to nearest even. Two rows must not share a place. Nothing is
// written when an argument is wrong. On a GPU nobody looks at the values of the lists, and rows of
// the sequence -1 are left out. Throws InvalidArgument.
EFFINFER_API void append_paged_kv_cache(const AppendTensors& keys, const AppendTensors& values,
                                        const AppendPlaces& places, KvOrder order,
                                        const Executor& executor, const AppendNames& names = {});

}  // namespace effinfer::ops
