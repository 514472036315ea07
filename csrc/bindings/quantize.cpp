// Quantising weights, and writing GGUF files.
#include "effinfer/quantize.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/module.h"
#include "bindings/strings.h"
#include "effinfer/error.h"
#include "effinfer/gguf_writer.h"

namespace effinfer::bindings {
namespace {

// A tensor's new bytes and its relative error: the norm of the difference over that of the values.
py::tuple quantize_view(const TensorView& view, const std::string& dtype,
                        const std::shared_ptr<ThreadPool>& pool) {
  const DType target = parse_dtype(dtype);
  const TensorView result{nullptr, target, view.dims};
  py::array_t<uint8_t> out(can_quantize_to(target) ? static_cast<py::ssize_t>(result.num_bytes())
                                                   : 0);
  uint8_t* bytes = out.mutable_data();
  ThreadPool& threads = pool_or_default(pool);
  QuantizeError error;
  {
    const py::gil_scoped_release release;
    error = quantize(view, target, threads, bytes);
  }
  const double relative =
      error.squared_error == 0 ? 0.0 : std::sqrt(error.squared_error / error.squared_values);
  return py::make_tuple(out, relative);
}

template <class Int>
GgufValue integer_value(const py::object& object) {
  try {
    return GgufValue(object.cast<Int>());
  } catch (const py::cast_error&) {  // pybind11 has cleared the interpreter's own error
    throw InvalidArgument("[gguf] value: expected an int from -2^63 to 2^64 - 1, got " +
                          std::string(py::str(object)));
  }
}

// Calls body(value) with the metadata value that a Python object stands for.
template <class Body>
void with_value(const py::object& object, Body&& body) {
  if (py::isinstance<py::bool_>(object)) return body(GgufValue(object.cast<bool>()));
  if (py::isinstance<py::float_>(object)) return body(GgufValue(object.cast<double>()));
  if (py::isinstance<py::int_>(object)) {
    const bool negative = object < py::int_(0);
    return body(negative ? integer_value<int64_t>(object) : integer_value<uint64_t>(object));
  }
  if (py::isinstance<py::str>(object) || py::isinstance<py::bytes>(object)) {
    const std::string text = to_bytes(object);
    return body(GgufValue(std::string_view(text)));
  }
  GgufArray array;
  if (py::isinstance<py::array>(object)) {
    const auto values = py::array::ensure(object, py::array::c_style);
    const std::string kind = py::str(values.dtype().attr("name"));
    if (kind == "int32") {
      array.type = GgufArray::Type::i32;
    } else if (kind == "uint32") {
      array.type = GgufArray::Type::u32;
    } else if (kind == "float32") {
      array.type = GgufArray::Type::f32;
    } else if (kind == "bool") {
      array.type = GgufArray::Type::boolean;
    } else {
      throw InvalidArgument(
          "[gguf] value: expected an array of int32, uint32, float32 or bool, "
          "got " +
          kind);
    }
    array.size = static_cast<uint64_t>(values.size());
    array.bytes = {static_cast<const uint8_t*>(values.data()),
                   static_cast<size_t>(values.nbytes())};
    return body(GgufValue(array));
  }
  if (!py::isinstance<py::list>(object)) {
    throw InvalidArgument(
        "[gguf] value: expected int, float, bool, str, a list of str or an array");
  }
  std::string texts;  // as in a file
  for (const py::handle item : object.cast<py::list>()) {
    const std::string text = to_bytes(py::reinterpret_borrow<py::object>(item));
    const uint64_t length = text.size();
    texts.append(reinterpret_cast<const char*>(&length), sizeof(length)).append(text);
    ++array.size;
  }
  array.type = GgufArray::Type::string;
  array.bytes = {reinterpret_cast<const uint8_t*>(texts.data()), texts.size()};
  body(GgufValue(std::move(array)));
}

void register_writer(py::module_& m) {
  py::class_<GgufWriter>(m, "GgufWriter",
                         "A GGUF file, written metadata first, then all tensor descriptions, then "
                         "their data; it appears with commit(), complete or not at all.")
      .def(py::init(
               [](const py::object& path) { return std::make_unique<GgufWriter>(to_path(path)); }),
           py::arg("path"))
      .def(
          "set",
          [](GgufWriter& self, const py::object& key, const py::object& value) {
            with_value(value, [&](const GgufValue& held) { self.set(to_bytes(key), held); });
          },
          py::arg("key"), py::arg("value"),
          "Metadata: int, float (32 bits), bool, str, list of str, or an array of int32, uint32, "
          "float32 or bool.")
      .def(
          "remove", [](GgufWriter& self, const py::object& key) { self.remove(to_bytes(key)); },
          py::arg("key"))
      .def("copy_metadata", &GgufWriter::copy_metadata, py::arg("source"),
           "All metadata of a GgufFile, but for its alignment.")
      .def(
          "add_tensor",
          [](GgufWriter& self, const py::object& name, const std::string& dtype,
             const std::vector<int64_t>& shape) {
            Dims dims;
            for (const int64_t dim : shape) dims.push_back(dim);
            self.add_tensor(to_bytes(name), parse_dtype(dtype), dims);
          },
          py::arg("name"), py::arg("dtype"), py::arg("shape"))
      .def(
          "write",
          [](GgufWriter& self, const py::array& array) {
            if ((array.flags() & py::array::c_style) == 0) {
              throw InvalidArgument("[gguf] data: expected a C-contiguous array, got strides");
            }
            const void* data = array.data();
            const auto size = static_cast<size_t>(array.nbytes());
            const py::gil_scoped_release release;
            self.write(data, size);
          },
          py::arg("data"), "The next bytes of the tensors' data, of one tensor at most.")
      .def("commit", &GgufWriter::commit, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void register_quantize(py::module_& m) {
  m.def(
      "quantize",
      [](const std::string& dtype, const py::array& values, const std::string& source_dtype,
         const std::optional<std::vector<int64_t>>& shape,
         const std::shared_ptr<ThreadPool>& pool) {
        const std::vector<int64_t> dims =
            shape ? *shape : std::vector<int64_t>(values.shape(), values.shape() + values.ndim());
        return quantize_view(view_of(values, source_dtype, dims, "[quantize]"), dtype, pool);
      },
      py::arg("dtype"), py::arg("values"), py::arg("source_dtype") = "f32",
      py::arg("shape") = py::none(), py::arg("pool") = py::none(),
      "The bytes of `values` as a tensor of `dtype`, and the relative error. `shape` (elements): "
      "of a source_dtype that is no numpy type.");
  m.def(
      "quantize_weight",
      [](const WeightSource& source, const py::object& name, const std::string& dtype,
         const std::shared_ptr<ThreadPool>& pool) {
        return quantize_view(source.weight(to_bytes(name)), dtype, pool);
      },
      py::arg("source"), py::arg("name"), py::arg("dtype"), py::arg("pool") = py::none(),
      "A weight's bytes as a tensor of `dtype`, and the relative error.");
  m.def(
      "can_quantize_to",
      [](const std::string& dtype) { return can_quantize_to(parse_dtype(dtype)); },
      py::arg("dtype"));
  register_writer(m);
}

}  // namespace effinfer::bindings
