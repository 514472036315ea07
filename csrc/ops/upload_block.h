// Arrays one after the other, for the memory of a GPU that is written at once.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

namespace effinfer::ops {

class UploadBlock {
 public:
  // Returns where the array begins, in bytes; it has room for `room`, filled up with `rest`.
  template <class T>
  size_t add(const T* values, size_t count, size_t room, const T& rest = {}) {
    constexpr size_t kAlignment = 256;
    const size_t place = (bytes_.size() + kAlignment - 1) / kAlignment * kAlignment;
    bytes_.resize(place + room * sizeof(T));
    std::byte* to = bytes_.data() + place;
    if (count > 0) std::memcpy(to, values, count * sizeof(T));
    for (size_t i = count; i < room; ++i) std::memcpy(to + i * sizeof(T), &rest, sizeof(T));
    return place;
  }
  template <class T>
  size_t add(const std::vector<T>& values, size_t room, const T& rest = {}) {
    return add(values.data(), values.size(), room, rest);
  }
  template <class T>
  size_t add(const std::vector<T>& values) {
    return add(values, values.size());
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace effinfer::ops
