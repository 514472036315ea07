// Rows of f32, f16 or bf16 numbers in the device's memory, for tests.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/float_elements.h"
#include "gpu/device_arrays.h"

namespace effinfer {

inline constexpr DType kRowTypes[] = {DType::f32, DType::f16, DType::bf16};

// Half the distance of neighbours near 1: what rounding to the type costs, relatively.
inline double rounding(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}

// What `dtype` makes of a number.
inline float rounded(DType dtype, float value) {
  return cpu::with_row_elements(dtype, [&]<class E>() { return E::load(E::store(value)); });
}
inline std::vector<float> rounded(DType dtype, std::vector<float> values) {
  for (float& x : values) x = rounded(dtype, x);
  return values;
}

// `offset` elements before the first one put it off the alignment of vector loads.
class FloatRows {
 public:
  FloatRows(DType dtype, const std::vector<float>& values, int64_t offset = 0)
      : FloatRows(dtype, static_cast<int64_t>(values.size()), offset) {
    std::vector<uint8_t> bytes(there_.size(), 0xff);
    cpu::with_row_elements(dtype, [&]<class E>() {
      for (size_t i = 0; i < values.size(); ++i) {
        const typename E::Stored stored = E::store(values[i]);
        std::memcpy(bytes.data() + offset_ + i * sizeof(stored), &stored, sizeof(stored));
      }
    });
    there_ = DeviceArray<uint8_t>(bytes);
  }
  // NaN in the emulator.
  FloatRows(DType dtype, int64_t size, int64_t offset = 0)
      : dtype_(dtype),
        offset_(static_cast<size_t>(offset * dtype_info(dtype).block_bytes)),
        there_(offset_ + static_cast<size_t>(size * dtype_info(dtype).block_bytes)) {}

  void* data() const { return there_.data() + offset_; }
  std::vector<float> values() const {
    const std::vector<uint8_t> bytes = there_.values();
    std::vector<float> out;
    cpu::with_row_elements(dtype_, [&]<class E>() {
      typename E::Stored stored;
      for (size_t i = offset_; i < bytes.size(); i += sizeof(stored)) {
        std::memcpy(&stored, bytes.data() + i, sizeof(stored));
        out.push_back(E::load(stored));
      }
    });
    return out;
  }

 private:
  DType dtype_;
  size_t offset_;
  DeviceArray<uint8_t> there_;
};

inline bool same_bits(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0;
}
inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) return false;
  }
  return true;
}

}  // namespace effinfer
