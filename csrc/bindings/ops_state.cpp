#include "bindings/arrays.h"
#include "bindings/module.h"
#include "effinfer/ops/merge_states.h"

namespace effinfer::bindings {
namespace {

using Pool = std::shared_ptr<ThreadPool>;

ops::LseBase parse_base(const std::string& op, const std::string& base) {
  if (base == "log2") return ops::LseBase::two;
  if (base == "ln") return ops::LseBase::e;
  throw InvalidArgument("[" + op + "] lse_base: expected log2 or ln, got " + base);
}

// The memory of an output of that shape and dtype.
void* output(py::array& array, const std::string& argument, const Dims& dims, DType dtype) {
  const TensorView view = view_of(array, argument);
  if (view.dims == dims && view.dtype == dtype) return array.mutable_data();
  throw InvalidArgument(argument + ": expected " + std::string(name(dtype)) + " " +
                        dims.to_string() + ", got " + std::string(name(view.dtype)) + " " +
                        view.dims.to_string());
}

void merge_states(const py::array& v, const py::array& s, py::array& out_v, py::array& out_s,
                  const std::string& lse_base, const Pool& pool) {
  const TensorView vectors = view_of(v, "[merge_states] v");
  const TensorView sums = view_of(s, "[merge_states] s");
  const ops::LseBase base = parse_base("merge_states", lse_base);
  const bool valid = vectors.dims.rank() == 4;
  const Dims merged = valid ? Dims{vectors.dims[0], vectors.dims[2], vectors.dims[3]} : Dims{};
  const Dims merged_sums = valid ? Dims{merged[0], merged[1]} : Dims{};
  void* to_v = output(out_v, "[merge_states] out_v", merged, vectors.dtype);
  void* to_s = output(out_s, "[merge_states] out_s", merged_sums, DType::f32);
  const py::gil_scoped_release release;
  ops::merge_states(vectors, sums, base, to_v, static_cast<float*>(to_s), pool_or_default(pool));
}

void merge_state(const py::array& v_a, const py::array& s_a, const py::array& v_b,
                 const py::array& s_b, py::array& out_v, py::array& out_s, const py::object& mask,
                 const std::string& lse_base, const Pool& pool) {
  const TensorView first = view_of(v_a, "[merge_state] v_a");
  const TensorView first_sums = view_of(s_a, "[merge_state] s_a");
  const TensorView second = view_of(v_b, "[merge_state] v_b");
  const TensorView second_sums = view_of(s_b, "[merge_state] s_b");
  const TensorView rows = optional_view(mask, "[merge_state] mask");
  const ops::LseBase base = parse_base("merge_state", lse_base);
  void* to_v = output(out_v, "[merge_state] out_v", first.dims, first.dtype);
  void* to_s = output(out_s, "[merge_state] out_s", first_sums.dims, DType::f32);
  const py::gil_scoped_release release;
  ops::merge_state(first, first_sums, second, second_sums, rows, base, to_v,
                   static_cast<float*>(to_s), pool_or_default(pool));
}

}  // namespace

void register_ops_state(py::module_& m) {
  m.def("merge_states", &merge_states, py::arg("v"), py::arg("s"), py::arg("out_v"),
        py::arg("out_s"), py::arg("lse_base") = "log2", py::arg("pool") = py::none());
  m.def("merge_state", &merge_state, py::arg("v_a"), py::arg("s_a"), py::arg("v_b"), py::arg("s_b"),
        py::arg("out_v"), py::arg("out_s"), py::arg("mask") = py::none(),
        py::arg("lse_base") = "log2", py::arg("pool") = py::none());
}

}  // namespace effinfer::bindings
