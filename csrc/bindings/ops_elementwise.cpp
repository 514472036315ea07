#include "bindings/arrays.h"
#include "bindings/module.h"
#include "effinfer/ops/elementwise.h"
#include "effinfer/ops/embedding.h"
#include "effinfer/ops/rms_norm.h"
#include "effinfer/ops/rope.h"

namespace effinfer::bindings {
namespace {

using Pool = std::shared_ptr<ThreadPool>;

template <class Op>
void bind_unary(py::module_& m, const char* name, Op op) {
  const std::string argument = "[" + std::string(name) + "] x";
  m.def(
      name,
      [op, argument](const py::array& x, const Pool& pool) {
        const TensorView view = view_of(x, argument);
        py::array_t<float> out = new_array(view.dims);
        float* data = out.mutable_data();
        const py::gil_scoped_release release;
        op(view, data, pool_or_default(pool));
        return out;
      },
      py::arg("x"), py::arg("pool") = py::none());
}

template <class Op>
void bind_unary_with(py::module_& m, const char* name, const char* parameter, Op op) {
  const std::string argument = "[" + std::string(name) + "] x";
  m.def(
      name,
      [op, argument](const py::array& x, float value, const Pool& pool) {
        const TensorView view = view_of(x, argument);
        py::array_t<float> out = new_array(view.dims);
        float* data = out.mutable_data();
        const py::gil_scoped_release release;
        op(view, value, data, pool_or_default(pool));
        return out;
      },
      py::arg("x"), py::arg(parameter), py::arg("pool") = py::none());
}

template <class Op>
void bind_binary(py::module_& m, const char* name, Op op) {
  const std::string prefix = "[" + std::string(name) + "] ";
  m.def(
      name,
      [op, prefix](const py::array& a, const py::array& b, const Pool& pool) {
        const TensorView left = view_of(a, prefix + "a");
        const TensorView right = view_of(b, prefix + "b");
        py::array_t<float> out = new_array(left.dims);
        float* data = out.mutable_data();
        const py::gil_scoped_release release;
        op(left, right, data, pool_or_default(pool));
        return out;
      },
      py::arg("a"), py::arg("b"), py::arg("pool") = py::none());
}

py::object rms_norm(const py::array& x, const py::object& weight, float eps, int64_t groups,
                    const py::object& residual, const Pool& pool) {
  const TensorView view = view_of(x, "[rms_norm] x");
  const TensorView scales = optional_view(weight, "[rms_norm] weight");
  const TensorView added = optional_view(residual, "[rms_norm] residual");
  const ops::RmsNormOptions options{eps, groups};
  py::array_t<float> out = new_array(view.dims);
  float* data = out.mutable_data();
  if (residual.is_none()) {
    const py::gil_scoped_release release;
    ops::rms_norm(view, scales, options, data, pool_or_default(pool));
    return out;
  }
  py::array_t<float> sum = new_array(view.dims);
  float* sum_data = sum.mutable_data();
  {
    const py::gil_scoped_release release;
    ops::add_rms_norm(view, added, scales, options, sum_data, data, pool_or_default(pool));
  }
  return py::make_tuple(out, sum);
}

py::array_t<float> embedding(const py::array& ids, const py::array& table, const std::string& dtype,
                             int64_t rows, int64_t cols, float scale, const Pool& pool) {
  const TensorView tokens = view_of(ids, "[embedding] ids");
  const TensorView view = view_of(table, dtype, {rows, cols}, "[embedding] table");
  py::array_t<float> out = new_array({tokens.dims.num_elements(), cols});
  float* data = out.mutable_data();
  const py::gil_scoped_release release;
  ops::embedding(tokens, view, scale, data, pool_or_default(pool));
  return out;
}

py::array_t<float> select_rows(const py::array& x, const py::array& rows, const Pool& pool) {
  const TensorView source = view_of(x, "[select_rows] x");
  const TensorView wanted = view_of(rows, "[select_rows] rows");
  const int64_t cols = source.dims.rank() == 0 ? 0 : source.dims[source.dims.rank() - 1];
  py::array_t<float> out = new_array({wanted.dims.num_elements(), cols});
  float* data = out.mutable_data();
  const py::gil_scoped_release release;
  ops::select_rows(source, wanted, data, pool_or_default(pool));
  return out;
}

py::tuple rope_frequencies(int32_t dims, float theta, const std::string& scaling, float factor,
                           float original_max_position, float low_freq_factor,
                           float high_freq_factor, float beta_fast, float beta_slow,
                           float attention_factor, const py::object& divisors) {
  RopeParameters parameters;
  parameters.theta = theta;
  parameters.dims = dims;
  parameters.scaling = parse_rope_scaling(scaling);
  parameters.factor = factor;
  parameters.original_max_position = original_max_position;
  parameters.low_freq_factor = low_freq_factor;
  parameters.high_freq_factor = high_freq_factor;
  parameters.beta_fast = beta_fast;
  parameters.beta_slow = beta_slow;
  parameters.attention_factor = attention_factor;
  const ops::RopeFrequencies frequencies =
      ops::rope_frequencies(parameters, optional_view(divisors, "[rope_frequencies] divisors"));
  py::array_t<float> inv_freq(static_cast<py::ssize_t>(frequencies.inv_freq.size()),
                              frequencies.inv_freq.data());
  return py::make_tuple(inv_freq, frequencies.factor);
}

py::array_t<float> rope_table(const py::array& positions, const py::array& inv_freq, float factor,
                              const Pool& pool) {
  const TensorView view = view_of(positions, "[rope_table] positions");
  const TensorView frequencies = view_of(inv_freq, "[rope_table] inv_freq");
  if (frequencies.dtype != DType::f32 || frequencies.dims.rank() != 1) {
    throw InvalidArgument("[rope_table] inv_freq: expected float32 [dims / 2], got " +
                          std::string(name(frequencies.dtype)) + " " +
                          frequencies.dims.to_string());
  }
  const auto* values = static_cast<const float*>(frequencies.data);
  const ops::RopeFrequencies parameters{{values, values + frequencies.dims[0]}, factor};
  py::array_t<float> out = new_array({view.dims.num_elements(), 2, frequencies.dims[0]});
  float* data = out.mutable_data();
  const py::gil_scoped_release release;
  ops::rope_table(view, parameters, data, pool_or_default(pool));
  return out;
}

py::array_t<float> rope(const py::array& x, const py::array& table, bool interleaved,
                        const Pool& pool) {
  const TensorView view = view_of(x, "[rope] x");
  const TensorView angles = view_of(table, "[rope] table");
  py::array_t<float> out = new_array(view.dims);
  float* data = out.mutable_data();
  const py::gil_scoped_release release;
  ops::rope(view, angles, interleaved, data, pool_or_default(pool));
  return out;
}

}  // namespace

void register_ops_elementwise(py::module_& m) {
  bind_unary(m, "silu", ops::silu);
  bind_unary(m, "gelu_tanh", ops::gelu_tanh);
  bind_unary(m, "relu_squared", ops::relu_squared);
  bind_unary_with(m, "softcap", "cap", ops::softcap);
  bind_unary_with(m, "scale", "factor", ops::scale);
  bind_binary(m, "add", ops::add);
  bind_binary(m, "mul", ops::mul);
  m.def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps") = 1e-6f,
        py::arg("groups") = 1, py::arg("residual") = py::none(), py::arg("pool") = py::none());
  m.def("embedding", &embedding, py::arg("ids"), py::arg("table"), py::arg("dtype"),
        py::arg("rows"), py::arg("cols"), py::arg("scale") = 1.0f, py::arg("pool") = py::none());
  m.def("select_rows", &select_rows, py::arg("x"), py::arg("rows"), py::arg("pool") = py::none());
  m.def("rope_frequencies", &rope_frequencies, py::arg("dims"), py::kw_only(),
        py::arg("theta") = 10000.0f, py::arg("scaling") = "none", py::arg("factor") = 1.0f,
        py::arg("original_max_position") = 0.0f, py::arg("low_freq_factor") = 1.0f,
        py::arg("high_freq_factor") = 4.0f, py::arg("beta_fast") = 32.0f,
        py::arg("beta_slow") = 1.0f, py::arg("attention_factor") = 0.0f,
        py::arg("divisors") = py::none());
  m.def("rope_table", &rope_table, py::arg("positions"), py::arg("inv_freq"),
        py::arg("factor") = 1.0f, py::arg("pool") = py::none());
  m.def("rope", &rope, py::arg("x"), py::arg("table"), py::arg("interleaved") = false,
        py::arg("pool") = py::none());
}

}  // namespace effinfer::bindings
