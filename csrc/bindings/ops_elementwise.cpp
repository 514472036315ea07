#include "bindings/arrays.h"
#include "bindings/device_array.h"
#include "bindings/module.h"
#include "effinfer/ops/elementwise.h"
#include "effinfer/ops/embedding.h"
#include "effinfer/ops/packbits.h"

namespace effinfer::bindings {
namespace {

py::object unary(ops::UnaryOp op, const AnyArray& x, float parameter, const Where& pool,
                 const py::object& out) {
  const std::string prefix = std::string("[").append(name(op)).append("] ");
  const TensorView view = view_of(x, prefix + "x");
  Result result = float32_result(view.dims, pool, out, prefix + "out");
  const py::gil_scoped_release release;
  ops::unary(op, view, parameter, result.data, executor_of(pool));
  return std::move(result.array);
}

void bind_unary(py::module_& m, ops::UnaryOp op) {
  const std::string name(ops::names(op).op);
  const std::string parameter(ops::names(op).parameter);
  if (parameter.empty()) {
    const auto run = [op](const AnyArray& x, const Where& pool, const py::object& out) {
      return unary(op, x, 0.0f, pool, out);
    };
    m.def(name.c_str(), run, py::arg("x"), py::arg("pool") = py::none(),
          py::arg("out") = py::none());
  } else {
    const auto run = [op](const AnyArray& x, float value, const Where& pool,
                          const py::object& out) { return unary(op, x, value, pool, out); };
    m.def(name.c_str(), run, py::arg("x"), py::arg(parameter.c_str()), py::arg("pool") = py::none(),
          py::arg("out") = py::none());
  }
}

void bind_binary(py::module_& m, ops::BinaryOp op) {
  const std::string name(ops::name(op));
  const std::string prefix = "[" + name + "] ";
  m.def(
      name.c_str(),
      [op, prefix](const AnyArray& a, const AnyArray& b, const Where& pool,
                   const py::object& out) -> py::object {
        const TensorView left = view_of(a, prefix + "a");
        const TensorView right = view_of(b, prefix + "b");
        Result result = float32_result(left.dims, pool, out, prefix + "out");
        const py::gil_scoped_release release;
        ops::binary(op, left, right, result.data, executor_of(pool));
        return std::move(result.array);
      },
      py::arg("a"), py::arg("b"), py::arg("pool") = py::none(), py::arg("out") = py::none());
}

py::array_t<float> embedding(const py::array& ids, const py::array& table, const std::string& dtype,
                             int64_t rows, int64_t cols, float scale,
                             const std::shared_ptr<ThreadPool>& pool) {
  const TensorView tokens = view_of(ids, "[embedding] ids");
  const TensorView view = view_of(table, dtype, {rows, cols}, "[embedding] table");
  py::array_t<float> out = new_array({tokens.dims.num_elements(), cols});
  float* data = out.mutable_data();
  const py::gil_scoped_release release;
  ops::embedding(tokens, view, scale, data, pool_or_default(pool));
  return out;
}

py::object select_rows(const AnyArray& x, const AnyArray& rows, const Where& pool,
                       const py::object& out) {
  const TensorView source = view_of(x, "[select_rows] x");
  const TensorView wanted = view_of(rows, "[select_rows] rows");
  const int64_t cols = source.dims.rank() == 0 ? 0 : source.dims[source.dims.rank() - 1];
  Result result =
      float32_result({wanted.dims.num_elements(), cols}, pool, out, "[select_rows] out");
  const py::gil_scoped_release release;
  ops::select_rows(source, wanted, result.data, executor_of(pool));
  return std::move(result.array);
}

std::shared_ptr<DeviceArray> take_rows(const DeviceArray& x, const py::array& rows,
                                       const StreamQueue& queue) {
  const TensorView wanted = view_of(rows, "[take_rows] rows");
  Dims dims = x.view.dims;
  if (dims.rank() == 3) dims = {wanted.dims.num_elements(), dims[1], dims[2]};
  auto out = new_device_array(dims, x.view.dtype, queue);
  const py::gil_scoped_release release;
  ops::take_rows(x.view, wanted, out->view.data, *queue.queue);
  return out;
}

py::array_t<int64_t> packed_indptr(const py::array& indptr, int64_t size) {
  const TensorView segments = view_of(indptr, "[segment_packbits] indptr");
  py::array_t<int64_t> starts(indptr.size());
  ops::packed_indptr(segments, size, starts.mutable_data());
  return starts;
}

void packbits(const AnyArray& x, const AnyArray& indptr, const AnyArray& out_indptr,
              const std::string& bitorder, const AnyArray& out, const Where& pool) {
  const TensorView elements = view_of(x, "[packbits] x");
  const TensorView segments = view_of(indptr, "[packbits] indptr");
  const TensorView packed = view_of(out_indptr, "[packbits] out_indptr");
  const StridedView bytes = writable_view_of(out, "[packbits] out");
  const ops::BitOrder order = ops::parse_bit_order(bitorder);
  const py::gil_scoped_release release;
  ops::packbits(elements, segments, packed, order, bytes, executor_of(pool));
}

}  // namespace

void register_ops_elementwise(py::module_& m) {
  ops::for_unary_ops([&](ops::UnaryOp op) { bind_unary(m, op); });
  for (size_t i = 0; i < ops::kBinaryOpNames.size(); ++i) {
    bind_binary(m, static_cast<ops::BinaryOp>(i));
  }
  m.def("embedding", &embedding, py::arg("ids"), py::arg("table"), py::arg("dtype"),
        py::arg("rows"), py::arg("cols"), py::arg("scale") = 1.0f, py::arg("pool") = py::none());
  m.def("take_rows", &take_rows, py::arg("x"), py::arg("rows"), py::arg("queue"));
  m.def("select_rows", &select_rows, py::arg("x"), py::arg("rows"), py::arg("pool") = py::none(),
        py::arg("out") = py::none());
  m.def("packed_indptr", &packed_indptr, py::arg("indptr"), py::arg("size"),
        "Where segments of `size` booleans start as whole bytes of bits: int64.");
  m.def("packbits", &packbits, py::arg("x"), py::arg("indptr"), py::arg("out_indptr"),
        py::arg("bitorder"), py::arg("out"), py::arg("pool") = py::none());
}

}  // namespace effinfer::bindings
