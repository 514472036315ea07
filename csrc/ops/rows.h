// Where the rows of an operator over vectors lie.
#pragma once

#include <cstdint>

namespace effinfer::ops {

// Vectors in a grid of `groups` a row, each contiguous: strides in elements.
template <class Void>
struct RowsOf {
  Void* data = nullptr;
  int64_t stride = 0;
  int64_t group_stride = 0;

  template <class T>
  [[gnu::always_inline]] constexpr T* at(int64_t row, int64_t group) const {
    if (data == nullptr) return nullptr;
    return static_cast<T*>(data) + row * stride + group * group_stride;
  }
};
using ConstRows = RowsOf<const void>;
using Rows = RowsOf<void>;

}  // namespace effinfer::ops
