// Checks shared by the operators: each throws InvalidArgument "[op] argument: expected X, got Y".
#pragma once

#include <string>
#include <string_view>

#include "effinfer/error.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

// The operator being validated: expect(ok, "weight", "shape [576]", "[512]").
class Validator {
 public:
  explicit Validator(std::string_view op) : op_(op) {}

  void expect(bool ok, std::string_view argument, std::string_view expected,
              std::string_view got) const {
    if (ok) return;
    std::string message = "[";
    message.append(op_).append("] ").append(argument);
    throw InvalidArgument(
        message.append(": expected ").append(expected).append(", got ").append(got));
  }

  // Of that dtype, and not null unless it is empty.
  void dtype(std::string_view argument, const TensorView& view, DType expected) const {
    expect(view.dtype == expected, argument, "dtype " + std::string(name(expected)),
           name(view.dtype));
    data(argument, view.data, view.dims);
  }

  void data(std::string_view argument, const void* pointer, const Dims& dims) const {
    expect(pointer != nullptr || dims.num_elements() == 0, argument, "data", "null");
  }

  void rank(std::string_view argument, const TensorView& view, int expected) const {
    expect(view.dims.rank() == expected, argument, std::to_string(expected) + " dimensions",
           "shape " + view.dims.to_string());
  }

  void shape(std::string_view argument, const TensorView& view, const Dims& expected) const {
    expect(view.dims == expected, argument, "shape " + expected.to_string(), view.dims.to_string());
  }

  // Every value of an int32 vector is in [0, limit).
  void indices(std::string_view argument, const TensorView& view, int64_t limit) const {
    dtype(argument, view, DType::i32);
    rank(argument, view, 1);
    const auto* values = static_cast<const int32_t*>(view.data);
    for (int64_t i = 0; i < view.dims[0]; ++i) {
      if (values[i] >= 0 && values[i] < limit) continue;
      expect(false, std::string(argument) + "[" + std::to_string(i) + "]",
             "a value in [0, " + std::to_string(limit) + ")", std::to_string(values[i]));
    }
  }

 private:
  std::string_view op_;
};

}  // namespace effinfer::ops
