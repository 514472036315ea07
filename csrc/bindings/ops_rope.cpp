// Rotary position embedding.
#include "bindings/arrays.h"
#include "bindings/device_array.h"
#include "bindings/module.h"
#include "effinfer/ops/rope.h"

namespace effinfer::bindings {
namespace {

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

ops::RopeFrequencies frequencies_of(const char* argument, const py::array& inv_freq, float factor) {
  const TensorView frequencies = view_of(inv_freq, argument);
  if (frequencies.dtype != DType::f32 || frequencies.dims.rank() != 1) {
    throw InvalidArgument(std::string(argument) + ": expected float32 [dims / 2], got " +
                          std::string(name(frequencies.dtype)) + " " +
                          frequencies.dims.to_string());
  }
  const auto* values = static_cast<const float*>(frequencies.data);
  return {{values, values + frequencies.dims[0]}, factor};
}

py::object rope_table(const AnyArray& positions, const py::array& inv_freq, float factor,
                      const Where& pool, const py::object& out) {
  const TensorView view = view_of(positions, "[rope_table] positions");
  const ops::RopeFrequencies parameters = frequencies_of("[rope_table] inv_freq", inv_freq, factor);
  const auto half = static_cast<int64_t>(parameters.inv_freq.size());
  Result result =
      float32_result({view.dims.num_elements(), 2, half}, pool, out, "[rope_table] out");
  const py::gil_scoped_release release;
  ops::rope_table(view, parameters, result.data, executor_of(pool));
  return std::move(result.array);
}

// Without `out` a new array of numpy's.
py::object rope_positions(const AnyArray& indptr, const AnyArray& offsets, int64_t rows,
                          const Where& pool, const py::object& out) {
  const TensorView starts = view_of(indptr, "[apply_rope] indptr");
  const TensorView first = view_of(offsets, "[apply_rope] offsets");
  py::object result = out.is_none() ? py::object(py::array_t<int32_t>(rows)) : out;
  const StridedView positions = writable_view_of(result, "[apply_rope] positions");
  const Executor executor = executor_of(pool);
  if (positions.device != executor.device() || positions.dtype != DType::i32 ||
      positions.dims.num_elements() != rows) {
    throw InvalidArgument("[apply_rope] positions: expected int32 of all rows on " +
                          name(executor.device()));
  }
  const py::gil_scoped_release release;
  ops::rope_positions(starts, first, rows, static_cast<int32_t*>(positions.data), executor);
  return result;
}

void apply_rope(const AnyArray& q, const AnyArray& k, const AnyArray& cos_sin_cache,
                const py::object& positions, bool interleaved, const AnyArray& q_out,
                const AnyArray& k_out, const Where& pool) {
  const StridedView queries = strided_view_of(q, "[apply_rope] q");
  const StridedView keys = strided_view_of(k, "[apply_rope] k");
  const TensorView table = view_of(cos_sin_cache, "[apply_rope] cos_sin_cache");
  const TensorView rows = optional_view(positions, "[apply_rope] positions");
  const StridedView rotated_q = writable_view_of(q_out, "[apply_rope] q_out");
  const StridedView rotated_k = writable_view_of(k_out, "[apply_rope] k_out");
  const py::gil_scoped_release release;
  ops::apply_rope(queries, keys, table, rows, interleaved, rotated_q, rotated_k, executor_of(pool));
}

void apply_rope_pos_ids(const AnyArray& q, const AnyArray& k, const py::array& inv_freq,
                        float factor, const AnyArray& positions, bool interleaved,
                        const AnyArray& q_out, const AnyArray& k_out, const Where& pool) {
  const StridedView queries = strided_view_of(q, "[apply_rope] q");
  const StridedView keys = strided_view_of(k, "[apply_rope] k");
  const TensorView rows = view_of(positions, "[apply_rope] pos_ids");
  const StridedView rotated_q = writable_view_of(q_out, "[apply_rope] q_out");
  const StridedView rotated_k = writable_view_of(k_out, "[apply_rope] k_out");
  const ops::RopeFrequencies frequencies =
      frequencies_of("[apply_rope] inv_freq", inv_freq, factor);
  const py::gil_scoped_release release;
  ops::apply_rope(queries, keys, frequencies, rows, interleaved, rotated_q, rotated_k,
                  executor_of(pool));
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
        py::arg("factor") = 1.0f, py::arg("pool") = py::none(), py::arg("out") = py::none());
  m.def("apply_rope_pos_ids", &apply_rope_pos_ids, py::arg("q"), py::arg("k"), py::arg("inv_freq"),
        py::arg("factor"), py::arg("positions"), py::arg("interleaved"), py::arg("q_out"),
        py::arg("k_out"), py::arg("pool") = py::none());
  m.def("rope_positions", &rope_positions, py::arg("indptr"), py::arg("offsets"), py::arg("rows"),
        py::arg("pool") = py::none(), py::arg("out") = py::none());
  m.def("apply_rope", &apply_rope, py::arg("q"), py::arg("k"), py::arg("cos_sin_cache"),
        py::arg("positions"), py::arg("interleaved"), py::arg("q_out"), py::arg("k_out"),
        py::arg("pool") = py::none());
}

}  // namespace effinfer::bindings
