#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings/arrays.h"
#include "bindings/device_array.h"
#include "bindings/module.h"
#include "effinfer/error.h"
#include "effinfer/ops/matmul.h"

namespace effinfer::bindings {
namespace {

using ops::PackedMatrix;

std::string shape_text(const py::array& array) {
  std::string text = "[";
  for (py::ssize_t i = 0; i < array.ndim(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(array.shape(i));
  }
  return text + "]";
}

// Of an argument of a GPU.
const float* check_there(const py::object& given, const char* argument, Device device,
                         const Dims& dims) {
  const TensorView view = view_of(given, std::string("[matmul] ") + argument);
  if (view.device == device && view.dtype == DType::f32 && view.dims == dims) {
    return static_cast<const float*>(view.data);
  }
  throw InvalidArgument(std::string("[matmul] ") + argument + ": expected f32 " + dims.to_string() +
                        " on " + name(device) + ", got " + std::string(name(view.dtype)) + " " +
                        view.dims.to_string() + " on " + name(view.device));
}

// A C-contiguous float32 array of the given shape; -1 leaves a dimension open.
const float* check_f32(const py::array& array, const char* argument,
                       std::initializer_list<int64_t> shape) {
  const bool contiguous = (array.flags() & py::array::c_style) != 0;
  if (!py::isinstance<py::array_t<float>>(array) || !contiguous) {
    throw InvalidArgument(
        std::string("[matmul] ") + argument + ": expected a C-contiguous float32 array, got " +
        std::string(py::str(array.dtype())) + (contiguous ? "" : " with strides"));
  }
  bool fits = array.ndim() == static_cast<py::ssize_t>(shape.size());
  std::string expected;
  py::ssize_t axis = 0;
  for (const int64_t dim : shape) {
    expected += axis > 0 ? ", " : "";
    expected += dim < 0 ? "n" : std::to_string(dim);
    if (fits && dim >= 0 && array.shape(axis) != dim) fits = false;
    ++axis;
  }
  if (!fits) {
    throw InvalidArgument(std::string("[matmul] ") + argument + ": expected shape [" + expected +
                          "], got " + shape_text(array));
  }
  return static_cast<const float*>(array.data());
}

PackedMatrix pack(const py::array& data, const std::string& dtype,
                  const std::pair<int64_t, int64_t>& shape, const std::shared_ptr<ThreadPool>& pool,
                  const std::optional<std::string>& ternary) {
  const auto packing = ternary ? ops::parse_ternary_packing(*ternary) : ops::TernaryPacking::none;
  TensorView view{data.data(), parse_dtype(dtype), {shape.first, shape.second}};
  if ((data.flags() & py::array::c_style) == 0) {
    throw InvalidArgument("[pack] data: expected a C-contiguous array, got one with strides");
  }
  if (view.num_bytes() != static_cast<size_t>(data.nbytes())) {
    throw InvalidArgument("[pack] data: expected " + std::to_string(view.num_bytes()) +
                          " bytes for " + dtype + " " + view.dims.to_string() + ", got " +
                          std::to_string(data.nbytes()));
  }
  const py::gil_scoped_release release;
  return PackedMatrix(view, pool_or_default(pool), packing);
}

py::array_t<float> unpack(const PackedMatrix& matrix) {
  py::array_t<float> out({matrix.rows(), matrix.cols()});
  float* data = out.mutable_data();
  const py::gil_scoped_release release;
  matrix.unpack(data);
  return out;
}

py::array_t<float> matmul(const py::array& x, const PackedMatrix& weight,
                          const std::string& arithmetic, const std::shared_ptr<ThreadPool>& pool,
                          const std::optional<py::array>& bias,
                          const std::optional<py::array>& residual, const std::string& method) {
  const auto parsed = ops::parse_matmul_arithmetic(arithmetic);
  const auto ternary = ops::parse_ternary_method(method);
  const float* values = check_f32(x, "x", {-1, weight.cols()});
  const int64_t n = x.shape(0);
  const float* bias_data = bias ? check_f32(*bias, "bias", {weight.rows()}) : nullptr;
  const float* residual_data =
      residual ? check_f32(*residual, "residual", {n, weight.rows()}) : nullptr;
  py::array_t<float> out({n, weight.rows()});
  float* result = out.mutable_data();
  const py::gil_scoped_release release;
  ops::matmul(values, n, weight, parsed, bias_data, residual_data, result, pool_or_default(pool),
              ternary);
  return out;
}

// Of a GPU's arrays, into `out`.
void matmul_there(const AnyArray& x, const PackedMatrix& weight, const AnyArray& out,
                  const StreamQueue& queue, const std::string& arithmetic, const py::object& bias,
                  const py::object& residual) {
  const auto parsed = ops::parse_matmul_arithmetic(arithmetic);
  const Device device = queue.queue->device();
  const TensorView rows = view_of(x, "[matmul] x");
  const int64_t n = rows.dims.rank() > 0 ? rows.dims[0] : 0;
  const Dims made = {n, weight.rows()};
  const float* values = check_there(x, "x", device, {n, weight.cols()});
  const float* bias_data =
      bias.is_none() ? nullptr : check_there(bias, "bias", device, {weight.rows()});
  const float* residual_data =
      residual.is_none() ? nullptr : check_there(residual, "residual", device, made);
  check_there(out, "out", device, made);
  auto* result = static_cast<float*>(writable_view_of(out, "[matmul] out").data);
  const py::gil_scoped_release release;
  ops::matmul(values, n, weight, parsed, bias_data, residual_data, result, *queue.queue);
}

py::tuple quantize_activation(const py::array& x) {
  const float* values = check_f32(x, "x", {-1, -1});
  const int64_t n = x.shape(0);
  const int64_t cols = x.shape(1);
  py::array_t<int8_t> q({n, cols});
  py::array_t<float> scales({n, (cols + 15) / 16});
  ops::quantize_activation(values, n, cols, q.mutable_data(), scales.mutable_data());
  return py::make_tuple(q, scales);
}

py::tuple quantize_tokens(const py::array& x) {
  const float* values = check_f32(x, "x", {-1, -1});
  const int64_t n = x.shape(0);
  const int64_t cols = x.shape(1);
  py::array_t<int8_t> q({n, cols});
  py::array_t<float> scales(n);
  ops::quantize_tokens(values, n, cols, q.mutable_data(), scales.mutable_data());
  return py::make_tuple(q, scales);
}

}  // namespace

void register_ops_matmul(py::module_& m) {
  py::class_<PackedMatrix>(m, "PackedMatrix", "A weight matrix in the layout of the kernels.")
      .def(py::init(&pack), py::arg("data"), py::arg("dtype"), py::arg("shape"),
           py::arg("pool") = nullptr, py::arg("ternary") = py::none(),
           "Packs the bytes of a [rows, cols] tensor of a weight dtype (\"f32\", \"q4_0\", ...); "
           "ternary ones as \"t2\" or \"t1_6\" for int8_token.")
      .def("unpack", &unpack, "The values of the tensor, float32 [rows, cols], bit for bit.")
      .def_property_readonly(
          "shape",
          [](const PackedMatrix& matrix) { return py::make_tuple(matrix.rows(), matrix.cols()); })
      .def_property_readonly("dtype",
                             [](const PackedMatrix& matrix) { return name(matrix.dtype()); })
      .def_property_readonly("format", &PackedMatrix::format)
      .def_property_readonly("device",
                             [](const PackedMatrix& matrix) { return name(matrix.device()); })
      .def(
          "to",
          [](const PackedMatrix& matrix, const std::string& device) {
            const Device parsed = parse_device(device, "[PackedMatrix.to] device");
            const py::gil_scoped_release release;
            return matrix.to(parsed);
          },
          py::arg("device"), "A copy in the memory of a GPU.")
      .def_property_readonly("num_bytes", &PackedMatrix::num_bytes);
  m.def("matmul", &matmul, py::arg("x"), py::arg("weight"), py::arg("arithmetic") = "int8",
        py::arg("pool") = nullptr, py::arg("bias") = py::none(), py::arg("residual") = py::none(),
        py::arg("method") = "auto",
        "x [n, cols] times the transposed weight, plus bias [rows] and residual [n, rows].");
  m.def("matmul_there", &matmul_there, py::arg("x"), py::arg("weight"), py::arg("out"),
        py::arg("queue"), py::arg("arithmetic"), py::arg("bias") = py::none(),
        py::arg("residual") = py::none(), "matmul of arrays of a GPU.");
  m.def(
      "matmul_kernel",
      [](const std::string& arithmetic) {
        return ops::matmul_kernel(ops::parse_matmul_arithmetic(arithmetic));
      },
      py::arg("arithmetic"),
      "The kernel that multiplies quantised weights at the current ISA level.");
  m.def("quantize_activation", &quantize_activation, py::arg("x"),
        "Rounds float32 rows to the int8 operand of matmul: (q [n, K], scales [n, ceil(K / 16)]).");
  m.def("quantize_tokens", &quantize_tokens, py::arg("x"),
        "Rounds float32 rows to the int8_token operand of matmul: (q [n, K], scales [n]).");
}

}  // namespace effinfer::bindings
