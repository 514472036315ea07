// Top-k of a window of each row, on GPUs: the windows as rows of their own, which top_k()
// (row_sampling.h) takes, and where what it chose lies. Nobody looks at lists on a GPU: windows are
// cut to their rows, and what lies outside of a table is undefined. On the CPU there is none of it.
#pragma once

#include <string_view>

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

// A row's window: int32 [rows] each, or of rank 0.
struct RowWindows {
  TensorView lengths;     // rank 0: all of a row
  TensorView starts;      // rank 0: 0
  bool mirrored = false;  // from the right, so that equal scores count from there
};

// out[row, i] = score i of the row's window, minus infinity behind it: x f32, f16 or bf16 [rows, n]
// with contiguous rows, out float32 [rows, n]. Throws InvalidArgument, and Unsupported on the CPU.
EFFINFER_API void window_rows(std::string_view op, const StridedView& x, const RowWindows& windows,
                              const StridedView& out, const Executor& executor);

// What is told of a chosen score: with `table` the slot table[row_to_batch[row], first[row] + id /
// page_size] * page_size + id % page_size, else its id in the window plus offsets[row]. int32, of
// rank 0 where there is none; row_to_batch: the row's own number, first: 0.
struct ChosenPlaces {
  TensorView offsets;  // [rows]
  TensorView table;    // [sequences, pages]
  TensorView row_to_batch;
  TensorView first;
  int32_t page_size = 1;
};

// out, int32 [rows, k]: what is told of ids [rows, m] int64, ascending as top_k() gives them of
// window_rows() of `width` scores, m at most k; in the order of the window's ids, then -1. raw: the
// ids themselves, or of rank 0.
EFFINFER_API void place_chosen(std::string_view op, const TensorView& ids, int64_t width,
                               const RowWindows& windows, const ChosenPlaces& places,
                               const StridedView& out, const StridedView& raw,
                               const Executor& executor);

// ids and values of top_k() of mirrored whole rows as those of x [rows, n], in place: int64 [rows,
// k], and of x's dtype. Of unsorted ones the order is turned round.
EFFINFER_API void unmirror_chosen(std::string_view op, const TensorView& x, bool sorted,
                                  const StridedView& ids, const StridedView& values,
                                  const Executor& executor);

}  // namespace effinfer::ops
