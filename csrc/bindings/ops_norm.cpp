// The operators over rows: norms and gated activations.
#include "bindings/arrays.h"
#include "bindings/device_array.h"
#include "bindings/module.h"
#include "effinfer/ops/activation.h"
#include "effinfer/ops/convert_rows.h"
#include "effinfer/ops/norm.h"

namespace effinfer::bindings {
namespace {

void rmsnorm(const AnyArray& input, const py::object& weight, const AnyArray& out, float eps,
             float weight_offset, const Where& pool) {
  const StridedView x = strided_view_of(input, "[rmsnorm] input");
  const TensorView weights = optional_view(weight, "[rmsnorm] weight");
  const StridedView result = writable_view_of(out, "[rmsnorm] out");
  const py::gil_scoped_release release;
  ops::rmsnorm(x, weights, {eps, weight_offset}, result, executor_of(pool));
}

void fused_add_rmsnorm(const AnyArray& input, const AnyArray& residual, const py::object& weight,
                       float eps, float weight_offset, const Where& pool) {
  const StridedView x = writable_view_of(input, "[fused_add_rmsnorm] input");
  const StridedView sum = writable_view_of(residual, "[fused_add_rmsnorm] residual");
  const TensorView weights = optional_view(weight, "[fused_add_rmsnorm] weight");
  const py::gil_scoped_release release;
  ops::fused_add_rmsnorm(x, sum, weights, {eps, weight_offset}, executor_of(pool));
}

void layernorm(const AnyArray& input, const AnyArray& gemma, const AnyArray& beta,
               const AnyArray& out, float eps, const Where& pool) {
  const StridedView x = strided_view_of(input, "[layernorm] input");
  const TensorView scale = view_of(gemma, "[layernorm] gemma");
  const TensorView shift = view_of(beta, "[layernorm] beta");
  const StridedView result = writable_view_of(out, "[layernorm] out");
  const py::gil_scoped_release release;
  ops::layernorm(x, scale, shift, eps, result, executor_of(pool));
}

void convert_rows(const AnyArray& x, const AnyArray& out, float factor, const std::string& op,
                  const std::string& argument, const py::object& divisor, const Where& pool) {
  const std::string label = "[" + op + "] ";
  const StridedView rows = strided_view_of(x, label + argument);
  const StridedView result = writable_view_of(out, label + "out");
  const TensorView by = optional_view(divisor, label + "scale");
  const py::gil_scoped_release release;
  ops::convert_rows(rows, factor, result, executor_of(pool), {op.c_str(), argument.c_str(), "out"},
                    by);
}

template <class Op>
void bind_gated(py::module_& m, const char* name, Op op) {
  const std::string prefix = "[" + std::string(name) + "] ";
  m.def(
      name,
      [op, prefix](const AnyArray& input, const AnyArray& out, const Where& pool) {
        const StridedView x = strided_view_of(input, prefix + "input");
        const StridedView result = writable_view_of(out, prefix + "out");
        const py::gil_scoped_release release;
        op(x, result, executor_of(pool));
      },
      py::arg("input"), py::arg("out"), py::arg("pool") = py::none());
}

}  // namespace

void register_ops_norm(py::module_& m) {
  m.def("rmsnorm", &rmsnorm, py::arg("input"), py::arg("weight"), py::arg("out"),
        py::arg("eps") = 1e-6f, py::arg("weight_offset") = 0.0f, py::arg("pool") = py::none());
  m.def("fused_add_rmsnorm", &fused_add_rmsnorm, py::arg("input"), py::arg("residual"),
        py::arg("weight"), py::arg("eps") = 1e-6f, py::arg("weight_offset") = 0.0f,
        py::arg("pool") = py::none());
  m.def("layernorm", &layernorm, py::arg("input"), py::arg("gemma"), py::arg("beta"),
        py::arg("out"), py::arg("eps") = 1e-6f, py::arg("pool") = py::none());
  m.def("convert_rows", &convert_rows, py::arg("x"), py::arg("out"), py::arg("factor") = 1.0f,
        py::arg("op") = "convert_rows", py::arg("argument") = "x", py::arg("divisor") = py::none(),
        py::arg("pool") = py::none());
  bind_gated(m, "silu_and_mul", ops::silu_and_mul);
  bind_gated(m, "gelu_and_mul", ops::gelu_and_mul);
  bind_gated(m, "gelu_tanh_and_mul", ops::gelu_tanh_and_mul);
}

}  // namespace effinfer::bindings
