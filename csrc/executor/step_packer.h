// The block of arrays that a step of a device uploads: an image of it in the host's memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "effinfer/error.h"

namespace effinfer::executor {

// Of an array in the block.
inline constexpr size_t kPackedAlignment = 16;

constexpr size_t packed_bytes(size_t bytes) {
  return (bytes + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
}

// Arrays one after the other, aligned.
class StepPacker {
 public:
  StepPacker(std::byte* image, size_t bytes, std::byte* block)
      : image_(image), bytes_(bytes), block_(block) {}

  // `count` elements: `values`, and `rest` where they end.
  template <class T>
  std::span<const T> add(std::span<const T> values, size_t count, const T& rest) {
    if (used_ + packed_bytes(count * sizeof(T)) > bytes_) {
      throw InternalError("[run] the step's arrays are larger than their block");
    }
    T* to = reinterpret_cast<T*>(image_ + used_);
    std::copy(values.begin(), values.end(), to);
    std::fill(to + values.size(), to + count, rest);
    const T* there = reinterpret_cast<const T*>(block_ + used_);
    used_ += packed_bytes(count * sizeof(T));
    return {there, count};
  }
  // `count` elements: those that element() makes of `values`, and what it makes of `rest`.
  template <class T, class Value, class Element>
  const T* add_each(std::span<const Value> values, size_t count, const Value& rest,
                    const Element& element) {
    T* to = reinterpret_cast<T*>(image_ + used_);
    const T* there = add(std::span<const T>(), count, element(rest)).data();
    std::transform(values.begin(), values.end(), to, element);
    return there;
  }
  template <class T>
  const T* add(const std::vector<T>& values, size_t count, const T& rest) {
    return add(std::span<const T>(values), count, rest).data();
  }
  size_t used() const { return used_; }

 private:
  std::byte* const image_;
  const size_t bytes_;
  std::byte* const block_;
  size_t used_ = 0;
};
}  // namespace effinfer::executor
