#include "bindings/arrays.h"

#include "bindings/module.h"

namespace effinfer::bindings {
namespace {

DType dtype_of(const py::array& array, std::string_view argument) {
  const py::dtype type = array.dtype();
  const char kind = type.kind();
  const auto size = type.itemsize();
  if (kind == 'f' && size == 4) return DType::f32;
  if (kind == 'f' && size == 2) return DType::f16;
  if (kind == 'i' && size == 1) return DType::i8;
  if (kind == 'u' && size == 1) return DType::u8;
  if (kind == 'i' && size == 4) return DType::i32;
  if (kind == 'i' && size == 8) return DType::i64;
  throw InvalidArgument(std::string(argument) +
                        ": expected float32, float16, int8, uint8, int32 or int64, got " +
                        std::string(py::str(type)));
}

}  // namespace

TensorView view_of(const py::array& array, std::string_view argument) {
  TensorView view;
  view.dtype = dtype_of(array, argument);
  if ((array.flags() & py::array::c_style) == 0) {
    throw InvalidArgument(std::string(argument) + ": expected a C-contiguous array, got strides");
  }
  if (array.ndim() > kMaxRank) {
    throw InvalidArgument(std::string(argument) + ": expected at most " + std::to_string(kMaxRank) +
                          " dimensions, got " + std::to_string(array.ndim()));
  }
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) view.dims.push_back(array.shape(axis));
  view.data = array.data();
  return view;
}

TensorView optional_view(const py::object& array, std::string_view argument) {
  if (array.is_none()) return {};
  if (!py::isinstance<py::array>(array)) {
    throw InvalidArgument(std::string(argument) + ": expected an array or None, got " +
                          std::string(py::str(py::type::of(array))));
  }
  return view_of(py::reinterpret_borrow<py::array>(array), argument);
}

}  // namespace effinfer::bindings
