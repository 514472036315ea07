// Tensors that someone else owns: what crosses the public API.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "effinfer/device.h"
#include "effinfer/dtype.h"
#include "effinfer/export.h"

namespace effinfer {

inline constexpr int kMaxRank = 5;

// Dimensions, outermost first. Rank 0 is a scalar.
class EFFINFER_API Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<int64_t> dims);
  int rank() const { return rank_; }
  int64_t operator[](int axis) const { return dims_[static_cast<size_t>(axis)]; }
  // Throws InvalidArgument beyond kMaxRank.
  void push_back(int64_t dim);
  // The product; throws InvalidArgument when it overflows int64 or a dimension is negative.
  int64_t num_elements() const;
  bool operator==(const Dims& other) const;
  std::string to_string() const;  // "[2, 3]"

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// Contiguous, row-major. For a quantised dtype the last dimension counts elements, not blocks.
struct EFFINFER_API TensorView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  Dims dims;
  Device device = {};

  // Bytes of the whole tensor; throws InvalidArgument when the last dimension is not a whole number
  // of blocks.
  size_t num_bytes() const;
};

// Any regular layout: element (i, j, ...) lies at data + (i * strides[0] + j * strides[1] + ...)
// elements of `dtype`, a plain number type. Strides may be zero (a broadcast dimension) or
// negative.
struct EFFINFER_API StridedView {
  void* data = nullptr;  // written to only where an operator says so
  DType dtype = DType::f32;
  Dims dims;
  std::array<int64_t, kMaxRank> strides{};
  Device device = {};

  // A dense row-major tensor.
  static StridedView dense(void* data, DType dtype, const Dims& dims);
  int64_t stride(int axis) const { return strides[static_cast<size_t>(axis)]; }
  // The last dimension is contiguous: it has a stride of 1 or fewer than two elements, or the
  // tensor is empty.
  bool contiguous_rows() const;
};

}  // namespace effinfer
