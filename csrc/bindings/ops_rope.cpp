// Rotary position embedding.
#include "bindings/arrays.h"
#include "bindings/module.h"
#include "effinfer/ops/rope.h"

namespace effinfer::bindings {
namespace {

using Pool = std::shared_ptr<ThreadPool>;

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

py::array_t<int32_t> rope_positions(const py::array& indptr, const py::array& offsets,
                                    int64_t rows) {
  const TensorView starts = view_of(indptr, "[apply_rope] indptr");
  const TensorView first = view_of(offsets, "[apply_rope] offsets");
  py::array_t<int32_t> out(rows);
  ops::rope_positions(starts, first, rows, out.mutable_data());
  return out;
}

void apply_rope(const py::array& q, const py::array& k, const py::array& cos_sin_cache,
                const py::object& positions, bool interleaved, const py::array& q_out,
                const py::array& k_out, const Pool& pool) {
  const StridedView queries = strided_view_of(q, "[apply_rope] q");
  const StridedView keys = strided_view_of(k, "[apply_rope] k");
  const TensorView table = view_of(cos_sin_cache, "[apply_rope] cos_sin_cache");
  const TensorView rows = optional_view(positions, "[apply_rope] positions");
  const StridedView rotated_q = writable_view_of(q_out, "[apply_rope] q_out");
  const StridedView rotated_k = writable_view_of(k_out, "[apply_rope] k_out");
  const py::gil_scoped_release release;
  ops::apply_rope(queries, keys, table, rows, interleaved, rotated_q, rotated_k,
                  pool_or_default(pool));
}

}  // namespace

void register_ops_rope(py::module_& m) {
  m.def("rope_frequencies", &rope_frequencies, py::arg("dims"), py::kw_only(),
        py::arg("theta") = 10000.0f, py::arg("scaling") = "none", py::arg("factor") = 1.0f,
        py::arg("original_max_position") = 0.0f, py::arg("low_freq_factor") = 1.0f,
        py::arg("high_freq_factor") = 4.0f, py::arg("beta_fast") = 32.0f,
        py::arg("beta_slow") = 1.0f, py::arg("attention_factor") = 0.0f,
        py::arg("divisors") = py::none());
  m.def("rope_table", &rope_table, py::arg("positions"), py::arg("inv_freq"),
        py::arg("factor") = 1.0f, py::arg("pool") = py::none());
  m.def("rope_positions", &rope_positions, py::arg("indptr"), py::arg("offsets"), py::arg("rows"));
  m.def("apply_rope", &apply_rope, py::arg("q"), py::arg("k"), py::arg("cos_sin_cache"),
        py::arg("positions"), py::arg("interleaved"), py::arg("q_out"), py::arg("k_out"),
        py::arg("pool") = py::none());
}

}  // namespace effinfer::bindings
