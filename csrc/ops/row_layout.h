// The rows of operators over vectors: leading dimensions of any rank as a grid of two.
#pragma once

#include <array>
#include <initializer_list>

#include "ops/rows.h"
#include "ops/validate.h"

namespace effinfer::ops {

// Rows of up to three tensors of equal leading dimensions: vector (row, group) of tensor i lies at
// row * strides[i] + group * group_strides[i].
struct RowLayout {
  int64_t rows = 1;
  int64_t groups = 1;
  std::array<int64_t, 3> strides{};
  std::array<int64_t, 3> group_strides{};

  Rows of(const StridedView& view, size_t i) const {
    return {view.data, strides[i], group_strides[i]};
  }
  ConstRows read(const StridedView& view, size_t i) const {
    return {view.data, strides[i], group_strides[i]};
  }
};

// Merges the dimensions but the last, outer to inner, wherever every tensor steps through both with
// one stride. Throws InvalidArgument about `argument` when more than two are left.
RowLayout merge_rows(const Validator& check, std::string_view argument,
                     std::initializer_list<const StridedView*> views);

// A tensor of float rows: f32, f16 or bf16, at least one dimension, the last one contiguous, data
// unless it is empty.
void check_rows(const Validator& check, std::string_view argument, const StridedView& view);

// Checks rows that are written, as check_rows(): of the expected dtype and dims, no element twice.
void check_written_rows(const Validator& check, std::string_view argument, const StridedView& view,
                        DType dtype, const Dims& dims);

}  // namespace effinfer::ops
