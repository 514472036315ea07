// numpy arrays as tensors.
#pragma once

#include <pybind11/numpy.h>

#include <string>
#include <string_view>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/tensor.h"

namespace effinfer::bindings {

inline pybind11::tuple shape_tuple(const Dims& dims) {
  pybind11::tuple shape(static_cast<size_t>(dims.rank()));
  for (int axis = 0; axis < dims.rank(); ++axis) {
    shape[static_cast<size_t>(axis)] = pybind11::int_(dims[axis]);
  }
  return shape;
}

inline std::vector<pybind11::ssize_t> shape_vector(const Dims& dims) {
  std::vector<pybind11::ssize_t> shape;
  for (int axis = 0; axis < dims.rank(); ++axis) shape.push_back(dims[axis]);
  return shape;
}

// The bytes of a C-contiguous array, whatever its element type, as a tensor of `dtype_name` and
// `shape`. Throws InvalidArgument when the sizes differ.
inline TensorView view_of(const pybind11::array& array, const std::string& dtype_name,
                          const std::vector<int64_t>& shape, const std::string& label) {
  TensorView view;
  view.data = array.data();
  view.dtype = parse_dtype(dtype_name);
  for (const int64_t dim : shape) view.dims.push_back(dim);
  if ((array.flags() & pybind11::array::c_style) == 0) {
    throw InvalidArgument(label + ": array: expected a C-contiguous array, got strides");
  }
  const auto given = static_cast<size_t>(array.nbytes());
  if (view.num_bytes() != given) {
    throw InvalidArgument(label + ": array: expected " + std::to_string(view.num_bytes()) +
                          " bytes for " + dtype_name + " " + view.dims.to_string() + ", got " +
                          std::to_string(given));
  }
  return view;
}

// The elements that arrays may have, for messages.
inline constexpr const char* kKnownElements =
    "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, uint8, int32, int64 or bool";
// The key in the metadata of a numpy dtype whose value names the elements that its integers carry.
inline constexpr const char* kDTypeTag = "effinfer";

// The numpy type of a plain dtype; numpy has none for bf16, f8_e4m3 and f8_e5m2: unsigned integers
// whose metadata say what they carry.
pybind11::dtype numpy_dtype(DType dtype);

// Of kKnownElements. Throws InvalidArgument for others, naming `argument`.
DType dtype_of(const pybind11::dtype& type, std::string_view argument);

// A C-contiguous array of kKnownElements as it is (bool as u8); bfloat16 and the 8-bit floats are
// known by ml_dtypes' names and by our tag. Throws InvalidArgument otherwise, naming `argument`
// ("[rms_norm] x").
TensorView view_of(const pybind11::array& array, std::string_view argument);

// Views an array with any strides, else as view_of().
StridedView strided_view_of(const pybind11::array& array, std::string_view argument);

// Views an array that the operator writes to, as strided_view_of(); read-only ones are refused too.
StridedView writable_view_of(const pybind11::array& array, std::string_view argument);

// The same of an argument that may be numpy's or a DeviceArray, whose view has its device.
TensorView view_of(const pybind11::object& array, std::string_view argument);
StridedView strided_view_of(const pybind11::object& array, std::string_view argument);
StridedView writable_view_of(const pybind11::object& array, std::string_view argument);

// Views an argument that may be None, as view_of(): then the view has no data.
TensorView optional_view(const pybind11::object& array, std::string_view argument);

// A new float32 array.
inline pybind11::array_t<float> new_array(const Dims& dims) {
  return pybind11::array_t<float>(shape_vector(dims));
}

// A new array with a vector's values, of one dimension where no shape is given.
template <class T>
pybind11::array_t<T> array_of(const std::vector<T>& values,
                              std::vector<pybind11::ssize_t> shape = {}) {
  if (shape.empty()) shape = {static_cast<pybind11::ssize_t>(values.size())};
  return pybind11::array_t<T>(shape, values.data());
}

// The values of a tensor of any weight dtype.
pybind11::array_t<float> dequantized(const TensorView& view);

// A read-only array over memory that `owner` keeps alive.
inline pybind11::array read_only_view(const pybind11::dtype& dtype, pybind11::ssize_t size,
                                      const void* data, const pybind11::object& owner) {
  pybind11::array array(dtype, {size}, data, owner);
  array.attr("setflags")(pybind11::arg("write") = false);
  return array;
}

}  // namespace effinfer::bindings
