// Weight sources: the base class that graphs are compiled with, and arrays in memory.
#include "effinfer/weights.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/module.h"
#include "bindings/strings.h"
#include "effinfer/error.h"
#include "effinfer/layered_weights.h"

namespace effinfer::bindings {
namespace {

bool interpreter_is_gone() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

// Keeps a Python object alive from any thread; the last owner takes the GIL to let it go.
std::shared_ptr<void> keep_alive(const py::object& object) {
  PyObject* pointer = object.ptr();
  Py_INCREF(pointer);
  return {static_cast<void*>(pointer), [](void* kept) {
            if (interpreter_is_gone()) return;
            const py::gil_scoped_acquire gil;
            Py_DECREF(static_cast<PyObject*>(kept));
          }};
}

void add_array(MemoryWeights& weights, const py::object& name, const py::array& array,
               const std::string& dtype_name, const std::vector<int64_t>& shape,
               const py::object& path, uint64_t offset) {
  const TensorView view = view_of(array, dtype_name, shape, "[weights] " + to_bytes(name));
  std::optional<WeightOrigin> origin;
  if (!path.is_none()) origin = WeightOrigin{to_path(path), file_state(to_path(path)), offset};
  weights.add(to_bytes(name), view, keep_alive(array), std::move(origin));
}

py::array_t<uint8_t> rows_of(const WeightSource& source, const py::object& name,
                             const std::vector<int64_t>& rows) {
  const TensorView view = source.weight(to_bytes(name));
  const bool is_matrix = view.dims.rank() == 2 && view.dims[0] > 0;
  const size_t row_bytes = is_matrix ? view.num_bytes() / static_cast<size_t>(view.dims[0]) : 0;
  const DTypeInfo& info = dtype_info(view.dtype);
  const bool is_rows = is_matrix && view.dims[1] % info.block_size == 0 && info.tail_bytes == 0;
  if (!is_rows) {
    throw InvalidArgument("[weights] " + to_bytes(name) +
                          ": expected a matrix of whole rows, got " +
                          std::string(effinfer::name(view.dtype)) + view.dims.to_string());
  }
  py::array_t<uint8_t> out(static_cast<py::ssize_t>(rows.size() * row_bytes));
  uint8_t* to = out.mutable_data();
  for (const int64_t row : rows) {
    if (row < 0 || row >= view.dims[0]) {
      throw InvalidArgument("[weights] rows: expected 0.." + std::to_string(view.dims[0] - 1) +
                            ", got " + std::to_string(row));
    }
    const auto* from = static_cast<const uint8_t*>(view.data);
    to = std::copy_n(from + static_cast<size_t>(row) * row_bytes, row_bytes, to);
  }
  return out;
}

}  // namespace

void register_weights(py::module_& m) {
  py::class_<WeightSource, std::shared_ptr<WeightSource>>(m, "WeightSource",
                                                          "Named weights of a model.")
      .def("__contains__", [](const WeightSource& self,
                              const py::object& name) { return self.contains(to_bytes(name)); })
      .def(
          "dtype",
          [](const WeightSource& self, const py::object& name) {
            return std::string(effinfer::name(self.weight(to_bytes(name)).dtype));
          },
          py::arg("name"), "Name of a weight's dtype.")
      .def(
          "shape",
          [](const WeightSource& self, const py::object& name) {
            return shape_tuple(self.weight(to_bytes(name)).dims);
          },
          py::arg("name"), "Shape of a weight, in elements.")
      .def(
          "dequantize",
          [](const WeightSource& self, const py::object& name) {
            return dequantized(self.weight(to_bytes(name)));
          },
          py::arg("name"), "A weight as float32 array in its shape.")
      .def("rows", &rows_of, py::arg("name"), py::arg("rows"),
           "The bytes of some rows of a matrix, uint8: a matrix of its dtype with these rows.");

  py::class_<MemoryWeights, WeightSource, std::shared_ptr<MemoryWeights>>(
      m, "MemoryWeights", "Weights in numpy arrays, which are referenced and not copied.")
      .def(py::init<>())
      .def("add", &add_array, py::arg("name"), py::arg("array"), py::arg("dtype"), py::arg("shape"),
           py::kw_only(), py::arg("path") = py::none(), py::arg("offset") = 0,
           "Adds or replaces a weight. `array` is C-contiguous, of any element type, and holds the "
           "bytes of a `dtype` tensor of that shape (elements, not blocks). `path`: the array "
           "is a read-only mapping of this file from byte `offset` on; its pages are dropped once "
           "they are packed, and the packed form may be kept on disk. Never give it for an array "
           "that can be written.");
  py::class_<LayeredWeights, MemoryWeights, std::shared_ptr<LayeredWeights>>(
      m, "LayeredWeights", "MemoryWeights in front of another source, whose other names it has.")
      .def(py::init([](std::shared_ptr<WeightSource> base) {
             return std::make_shared<LayeredWeights>(std::move(base));
           }),
           py::arg("base").none(false));
}

}  // namespace effinfer::bindings
