#include "ops/row_layout.h"

namespace effinfer::ops {

RowLayout merge_rows(const Validator& check, std::string_view argument,
                     std::initializer_list<const StridedView*> views) {
  const StridedView& first = **views.begin();
  RowLayout layout;
  int merged = 0;  // groups, then rows
  for (int axis = first.dims.rank() - 2; axis >= 0; --axis) {
    const int64_t dim = first.dims[axis];
    if (dim == 1) continue;
    int64_t& last_dim = merged == 2 ? layout.rows : layout.groups;
    std::array<int64_t, 3>& last = merged == 2 ? layout.strides : layout.group_strides;
    bool joins = merged > 0;
    size_t i = 0;
    for (const StridedView* view : views) {
      joins = joins && view->stride(axis) == last_dim * last[i++];
    }
    if (joins) {
      last_dim *= dim;
      continue;
    }
    check.expect(merged < 2, argument, "leading dimensions with at most two different strides",
                 "shape " + first.dims.to_string());
    (merged == 0 ? layout.groups : layout.rows) = dim;
    i = 0;
    for (const StridedView* view : views) {
      (merged == 0 ? layout.group_strides : layout.strides)[i++] = view->stride(axis);
    }
    ++merged;
  }
  return layout;
}

void check_rows(const Validator& check, std::string_view argument, const StridedView& view) {
  check.row_type(argument, view.dtype);
  check.expect(view.dims.rank() >= 1, argument, "at least one dimension", "a scalar");
  check.expect(view.dims.num_elements() == 0 || view.contiguous_rows(), argument,
               "a contiguous last dimension",
               "a stride of " + std::to_string(view.stride(view.dims.rank() - 1)) + " elements");
  check.data(argument, view);
}

void check_written_rows(const Validator& check, std::string_view argument, const StridedView& view,
                        DType dtype, const Dims& dims) {
  check.dtype(argument, view, dtype);
  check.shape(argument, view, dims);
  check_rows(check, argument, view);
  if (dims.num_elements() == 0) return;  // strides mean nothing
  for (int axis = 0; axis < dims.rank(); ++axis) {
    check.expect(dims[axis] < 2 || view.stride(axis) != 0, argument,
                 "an array without broadcast dimensions", "a stride of 0");
  }
}

}  // namespace effinfer::ops
