// A dense row-major tensor that someone else owns: what crosses the public API.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "effinfer/dtype.h"
#include "effinfer/export.h"

namespace effinfer {

inline constexpr int kMaxRank = 4;

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

  // Bytes of the whole tensor; throws InvalidArgument when the last dimension is not a whole number
  // of blocks.
  size_t num_bytes() const;
};

}  // namespace effinfer
