// Checks shared by the operators: each throws InvalidArgument "[op] argument: expected X, got Y".
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

// What rows of most operators may hold.
inline bool is_row_type(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}
// Of keys and values of a caller.
inline bool is_kv_type(DType dtype) {
  return is_row_type(dtype) || dtype == DType::i8 || dtype == DType::f8_e4m3 ||
         dtype == DType::f8_e5m2;
}

// "kv_len[3]"
inline std::string indexed(std::string_view argument, int64_t index) {
  return std::string(argument).append("[").append(std::to_string(index)).append("]");
}

// The operator being validated: expect(ok, "weight", "shape [576]", "[512]"). Every check of a view
// asks first whether it is on the device that the operator runs on.
class Validator {
 public:
  explicit Validator(std::string_view op, Device device = {}) : op_(op), device_(device) {}

  std::string_view op() const { return op_; }
  // Whether values may be looked at: of a GPU that would have the host wait for it.
  bool reads_values() const { return device_ == Device{}; }

  void expect(bool ok, std::string_view argument, std::string_view expected,
              std::string_view got) const {
    if (ok) return;
    std::string message = "[";
    message.append(op_).append("] ").append(argument);
    throw InvalidArgument(
        message.append(": expected ").append(expected).append(", got ").append(got));
  }

  void at_least(std::string_view argument, int64_t value, int64_t least) const {
    expect(value >= least, argument, std::to_string(least) + " or more", std::to_string(value));
  }

  void positive(std::string_view argument, int64_t value) const {
    expect(value > 0, argument, "a positive number", std::to_string(value));
  }

  void finite(std::string_view argument, float value) const {
    expect(std::isfinite(value), argument, "a finite number", std::to_string(value));
  }

  void row_type(std::string_view argument, DType dtype) const {
    expect(is_row_type(dtype), argument, "dtype f32, f16 or bf16", name(dtype));
  }

  template <class View>
  void device(std::string_view argument, const View& view) const {
    if (view.device == device_) return;
    expect(false, argument, "a tensor on " + name(device_), "one on " + name(view.device));
  }

  // A tensor has the dtype that is expected, and data unless it is empty.
  template <class View>
  void dtype(std::string_view argument, const View& view, DType expected) const {
    device(argument, view);
    expect(view.dtype == expected, argument, "dtype " + std::string(name(expected)),
           name(view.dtype));
    data(argument, view);
  }

  void data(std::string_view argument, const void* pointer, const Dims& dims) const {
    expect(pointer != nullptr || dims.num_elements() == 0, argument, "data", "null");
  }

  template <class View>
  void data(std::string_view argument, const View& view) const {
    device(argument, view);
    data(argument, view.data, view.dims);
  }

  template <class View>
  void rank(std::string_view argument, const View& view, int expected) const {
    device(argument, view);
    expect(view.dims.rank() == expected, argument, std::to_string(expected) + " dimensions",
           "shape " + view.dims.to_string());
  }

  template <class View>
  void shape(std::string_view argument, const View& view, const Dims& expected) const {
    device(argument, view);
    expect(view.dims == expected, argument, "shape " + expected.to_string(), view.dims.to_string());
  }

  // An int32 vector.
  std::span<const int32_t> ints(std::string_view argument, const TensorView& view) const {
    dtype(argument, view, DType::i32);
    rank(argument, view, 1);
    return {static_cast<const int32_t*>(view.data), static_cast<size_t>(view.dims[0])};
  }

  // Every value of an int32 vector is in [0, limit). Those of a GPU are not looked at: that would
  // have the host wait for it.
  void indices(std::string_view argument, const TensorView& view, int64_t limit) const {
    const std::span<const int32_t> values = ints(argument, view);
    if (device_ != Device{}) return;
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] >= 0 && values[i] < limit) continue;
      expect(false, indexed(argument, static_cast<int64_t>(i)),
             "a value in [0, " + std::to_string(limit) + ")", std::to_string(values[i]));
    }
  }

  // Starts of segments and the end of the last: at least one value, from 0, never decreasing.
  template <class T>
  void indptr(std::string_view argument, const T* values, int64_t count) const {
    expect(count >= 1, argument, "at least one value", "none");
    expect(values[0] == 0, argument, "0 first", std::to_string(values[0]));
    for (int64_t i = 1; i < count; ++i) {
      if (values[i - 1] <= values[i]) continue;
      expect(false, argument, "values that never decrease",
             std::to_string(values[i - 1]) + " before " + std::to_string(values[i]));
    }
  }

  // Segments hold the rows from 0 to `rows`, all of them.
  template <class T>
  void indptr_of_rows(std::string_view argument, const T* values, int64_t count,
                      int64_t rows) const {
    indptr(argument, values, count);
    expect(values[count - 1] == rows, argument, std::to_string(rows) + " last",
           std::to_string(values[count - 1]));
  }

  // An int32 array of that many segments.
  void indptr(std::string_view argument, const TensorView& view, int64_t segments) const {
    dtype(argument, view, DType::i32);
    shape(argument, view, {segments + 1});
    indptr(argument, static_cast<const int32_t*>(view.data), segments + 1);
  }

 private:
  std::string_view op_;
  Device device_;
};

// An int32 or int64 vector as int32, each value in [low, high].
class Int32Values {
 public:
  Int32Values(const Validator& check, std::string_view argument, const TensorView& view,
              int64_t low, int64_t high) {
    const bool wide = view.dtype == DType::i64;
    if (!wide) check.dtype(argument, view, DType::i32);
    check.data(argument, view);
    check.rank(argument, view, 1);
    const int64_t size = view.dims[0];
    data_ = static_cast<const int32_t*>(view.data);
    if (wide) copy_.resize(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) {
      const int64_t value = wide ? static_cast<const int64_t*>(view.data)[i] : data_[i];
      if (value < low || value > high) {
        check.expect(false, indexed(argument, i),
                     "a value in [" + std::to_string(low) + ", " + std::to_string(high) + "]",
                     std::to_string(value));
      }
      if (wide) copy_[static_cast<size_t>(i)] = static_cast<int32_t>(value);
    }
    if (wide) data_ = copy_.data();
  }
  Int32Values(const Int32Values&) = delete;
  Int32Values& operator=(const Int32Values&) = delete;

  const int32_t* data() const { return data_; }

 private:
  const int32_t* data_ = nullptr;
  std::vector<int32_t> copy_;
};

}  // namespace effinfer::ops
