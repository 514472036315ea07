#include "ops/top_windows.h"

#include "effinfer/ops/top_windows.h"
#include "ops/describe.h"
#include "ops/registry.h"
#include "ops/row_layout.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

// int32 [size], or null of rank 0.
const int32_t* list(const Validator& check, std::string_view argument, const TensorView& view,
                    int64_t size) {
  if (view.dims.rank() == 0) return nullptr;
  check.dtype(argument, view, DType::i32);
  check.shape(argument, view, {size});
  return static_cast<const int32_t*>(view.data);
}

WindowSpans spans(const Validator& check, const RowWindows& windows, int64_t rows, int64_t width) {
  return {list(check, "lengths", windows.lengths, rows),
          list(check, "row_starts", windows.starts, rows), width, windows.mirrored};
}

template <class T>
T* written(const Validator& check, std::string_view argument, const StridedView& view, DType dtype,
           const Dims& dims) {
  check.dtype(argument, view, dtype);
  check.shape(argument, view, dims);
  const bool dense = dims.num_elements() == 0 ||
                     (view.contiguous_rows() && (dims[0] < 2 || view.stride(0) == dims[1]));
  check.expect(dense, argument, "a C-contiguous array", "strides");
  return static_cast<T*>(view.data);
}

}  // namespace

std::string describe(const WindowRowsProblem& problem) {
  return "[window_rows]" + field("rows", problem.rows) + field("width", problem.windows.width);
}
std::string describe(const PlaceChosenProblem& problem) {
  return "[place_chosen]" + field("rows", problem.rows) + field("k", problem.k);
}
std::string describe(const UnmirrorProblem& problem) {
  return "[unmirror_chosen]" + field("rows", problem.rows) + field("k", problem.k);
}

void window_rows(std::string_view op, const StridedView& x, const RowWindows& windows,
                 const StridedView& out, const Executor& executor) {
  const Validator check(op, executor.device());
  check_rows(check, "input", x);
  check.rank("input", x, 2);
  WindowRowsProblem problem;
  problem.x = x.data;
  problem.dtype = x.dtype;
  problem.stride = x.stride(0);
  problem.rows = x.dims[0];
  problem.windows = spans(check, windows, problem.rows, x.dims[1]);
  problem.out = written<float>(check, "out", out, DType::f32, x.dims);
  run_alone(problem, executor);
}

void place_chosen(std::string_view op, const TensorView& ids, int64_t width,
                  const RowWindows& windows, const ChosenPlaces& places, const StridedView& out,
                  const StridedView& raw, const Executor& executor) {
  const Validator check(op, executor.device());
  check.dtype("ids", ids, DType::i64);
  check.rank("ids", ids, 2);
  check.rank("out", out, 2);
  PlaceChosenProblem problem;
  problem.ids = static_cast<const int64_t*>(ids.data);
  problem.rows = ids.dims[0];
  problem.chosen = ids.dims[1];
  problem.k = out.dims[1];
  check.at_least("out", problem.k, problem.chosen);
  problem.windows = spans(check, windows, problem.rows, width);
  problem.offsets = list(check, "offsets", places.offsets, problem.rows);
  if (places.table.dims.rank() > 0) {
    check.dtype("src_page_table", places.table, DType::i32);
    check.rank("src_page_table", places.table, 2);
    check.at_least("page_size", places.page_size, 1);
    problem.table = static_cast<const int32_t*>(places.table.data);
    problem.table_cols = places.table.dims[1];
    problem.page_size = places.page_size;
    problem.row_to_batch = list(check, "row_to_batch", places.row_to_batch, problem.rows);
    problem.first = list(check, "page_table_row_starts", places.first, problem.rows);
  }
  const Dims dims = {problem.rows, problem.k};
  problem.out = written<int32_t>(check, "out", out, DType::i32, dims);
  if (raw.dims.rank() > 0) {
    problem.raw = written<int32_t>(check, "out_raw_indices", raw, DType::i32, dims);
  }
  run_alone(problem, executor);
}

void unmirror_chosen(std::string_view op, const TensorView& x, bool sorted, const StridedView& ids,
                     const StridedView& values, const Executor& executor) {
  const Validator check(op, executor.device());
  check.row_type("input", x.dtype);
  check.rank("input", x, 2);
  check.rank("ids", ids, 2);
  UnmirrorProblem problem;
  problem.x = x.data;
  problem.element_bytes = static_cast<int32_t>(dtype_info(x.dtype).block_bytes);
  problem.rows = x.dims[0];
  problem.width = x.dims[1];
  problem.k = ids.dims[1];
  problem.sorted = sorted;
  const Dims dims = {problem.rows, problem.k};
  problem.ids = written<int64_t>(check, "ids", ids, DType::i64, dims);
  problem.values = written<void>(check, "values", values, x.dtype, dims);
  run_alone(problem, executor);
}

}  // namespace effinfer::ops
