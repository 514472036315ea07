#include "bindings/arrays.h"

#include <optional>

#include "bindings/device_array.h"
#include "bindings/dlpack.h"
#include "bindings/module.h"
#include "effinfer/gguf.h"

namespace effinfer::bindings {
namespace {
constexpr int kFirstUserType = 256;  // NPY_USERDEF: types that other packages register with numpy

// Knows the names that ml_dtypes gives, and those of our tag.
std::optional<DType> extended_dtype_of(std::string_view name) {
  if (name == "bfloat16" || name == "bf16") return DType::bf16;
  if (name == "float8_e4m3fn" || name == "f8_e4m3") return DType::f8_e4m3;
  if (name == "float8_e5m2" || name == "f8_e5m2") return DType::f8_e5m2;
  return std::nullopt;
}

// Knows numpy's own types only.
std::optional<DType> plain_dtype_of(const py::dtype& type) {
  const char kind = type.kind();
  const auto size = type.itemsize();
  if (kind == 'f' && size == 4) return DType::f32;
  if (kind == 'f' && size == 2) return DType::f16;
  if (kind == 'i' && size == 1) return DType::i8;
  if ((kind == 'u' || kind == 'b') && size == 1) return DType::u8;
  if (kind == 'i' && size == 4) return DType::i32;
  if (kind == 'i' && size == 8) return DType::i64;
  return std::nullopt;
}

}  // namespace

DType dtype_of(const py::dtype& type, std::string_view argument) {
  std::optional<DType> dtype;
  if (type.num() >= kFirstUserType) {
    dtype = extended_dtype_of(std::string(py::str(type.attr("name"))));
  } else if (type.byteorder() == '=' || type.byteorder() == '|') {
    const py::object tags = type.attr("metadata");
    if (!tags.is_none() && tags.contains(kDTypeTag)) {
      dtype = extended_dtype_of(std::string(py::str(tags[kDTypeTag])));
    } else {
      dtype = plain_dtype_of(type);
    }
  }
  if (dtype) return *dtype;
  throw InvalidArgument(std::string(argument) + ": expected " + kKnownElements + ", got " +
                        std::string(py::str(type)));
}

namespace {

void check_layout(const py::array& array, std::string_view argument) {
  if (array.ndim() > kMaxRank) {
    throw InvalidArgument(std::string(argument) + ": expected at most " + std::to_string(kMaxRank) +
                          " dimensions, got " + std::to_string(array.ndim()));
  }
  if ((array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0) {
    throw InvalidArgument(std::string(argument) + ": expected aligned elements, got unaligned");
  }
}

// Of an argument that is not numpy's.
const DeviceArray& device_array(const py::object& array, std::string_view argument) {
  if (py::isinstance<DeviceArray>(array)) return array.cast<const DeviceArray&>();
  throw InvalidArgument(std::string(argument) + ": expected an array, got " +
                        std::string(py::str(py::type::of(array))));
}

}  // namespace

py::dtype numpy_dtype(DType dtype) {
  const char* carrier = nullptr;
  switch (dtype) {
    case DType::f32:
      return py::dtype("float32");
    case DType::f16:
      return py::dtype("float16");
    case DType::i8:
      return py::dtype("int8");
    case DType::u8:
      return py::dtype("uint8");
    case DType::i32:
      return py::dtype("int32");
    case DType::i64:
      return py::dtype("int64");
    case DType::bf16:
      carrier = "uint16";
      break;
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      carrier = "uint8";
      break;
    default:
      throw InvalidArgument("[numpy_dtype] dtype: expected a plain number type, got " +
                            std::string(name(dtype)));
  }
  py::dict tag;
  tag[kDTypeTag] = name(dtype);
  return py::module_::import("numpy").attr("dtype")(carrier, py::arg("metadata") = tag);
}

TensorView view_of(const py::array& array, std::string_view argument) {
  TensorView view;
  view.dtype = dtype_of(array.dtype(), argument);
  if ((array.flags() & py::array::c_style) == 0) {
    throw InvalidArgument(std::string(argument) + ": expected a C-contiguous array, got strides");
  }
  check_layout(array, argument);
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) view.dims.push_back(array.shape(axis));
  view.data = array.data();
  return view;
}

StridedView strided_view_of(const py::array& array, std::string_view argument) {
  StridedView view;
  view.dtype = dtype_of(array.dtype(), argument);
  check_layout(array, argument);
  const py::ssize_t item = array.itemsize();
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
    view.dims.push_back(array.shape(axis));
    if (array.strides(axis) % item != 0) {
      throw InvalidArgument(std::string(argument) + ": expected strides of whole elements, got " +
                            std::to_string(array.strides(axis)) + " bytes");
    }
    view.strides[static_cast<size_t>(axis)] = array.strides(axis) / item;
  }
  view.data = const_cast<void*>(array.data());
  return view;
}

StridedView writable_view_of(const py::array& array, std::string_view argument) {
  if (!array.writeable()) {
    throw InvalidArgument(std::string(argument) +
                          ": expected a writable array, got a read-only one");
  }
  return strided_view_of(array, argument);
}

TensorView view_of(const py::object& array, std::string_view argument) {
  if (py::isinstance<py::array>(array)) {
    return view_of(py::reinterpret_borrow<py::array>(array), argument);
  }
  const DeviceArray& given = device_array(array, argument);
  if (!given.is_contiguous()) {
    throw InvalidArgument(std::string(argument) + ": expected a C-contiguous array, got strides");
  }
  return {given.view.data, given.view.dtype, given.view.dims, given.view.device};
}

StridedView strided_view_of(const py::object& array, std::string_view argument) {
  if (py::isinstance<py::array>(array)) {
    return strided_view_of(py::reinterpret_borrow<py::array>(array), argument);
  }
  return device_array(array, argument).view;
}

StridedView writable_view_of(const py::object& array, std::string_view argument) {
  if (py::isinstance<py::array>(array)) {
    return writable_view_of(py::reinterpret_borrow<py::array>(array), argument);
  }
  const DeviceArray& given = device_array(array, argument);
  if (!given.read_only) return given.view;
  throw InvalidArgument(std::string(argument) + ": expected a writable array, got a read-only one");
}

void register_arrays(py::module_& m) {
  m.def("from_dlpack", &from_dlpack, py::arg("producer"), py::arg("argument"),
        py::arg("stream") = 0,
        "An array over the memory of a DLPack producer: numpy's, or a DeviceArray whose contents "
        "are there for work in `stream`.");
  m.def(
      "numpy_dtype", [](const std::string& name) { return numpy_dtype(parse_dtype(name)); },
      py::arg("name"), "The numpy type that carries elements of a dtype: tagged integers of bf16.");
}

TensorView optional_view(const py::object& array, std::string_view argument) {
  if (array.is_none()) return {};
  if (!py::isinstance<py::array>(array) && !py::isinstance<DeviceArray>(array)) {
    throw InvalidArgument(std::string(argument) + ": expected an array or None, got " +
                          std::string(py::str(py::type::of(array))));
  }
  return view_of(array, argument);
}

py::array_t<float> dequantized(const TensorView& view) {
  py::array_t<float> out = new_array(view.dims);
  float* values = out.mutable_data();
  const int64_t count = view.dims.num_elements();
  const py::gil_scoped_release release;
  dequantize(view.dtype, view.data, count, values);
  return out;
}

}  // namespace effinfer::bindings
