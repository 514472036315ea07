#include "bindings/arguments.h"
#include "bindings/device_array.h"
#include "bindings/module.h"
#include "effinfer/ops/merge_states.h"

namespace effinfer::bindings {
namespace {

ops::LseBase base_of(const Arguments& arguments, const std::string& base) {
  return arguments.named<ops::LseBase>(base, "lse_base",
                                       {{"log2", ops::LseBase::two}, {"ln", ops::LseBase::e}});
}

// The memory of an output of that shape and dtype, where the operator runs.
void* output(const Arguments& arguments, const AnyArray& array, const char* argument,
             const Dims& dims, DType dtype, const Executor& executor) {
  const StridedView view = arguments.written(array, argument);
  arguments.view(array, argument);  // dense
  if (view.device != executor.device()) {
    throw InvalidArgument(arguments.label(argument) + ": expected a tensor on " +
                          name(executor.device()) + ", got one on " + name(view.device));
  }
  if (view.dims == dims && view.dtype == dtype) return view.data;
  throw InvalidArgument(arguments.label(argument) + ": expected " + std::string(name(dtype)) + " " +
                        dims.to_string() + ", got " + std::string(name(view.dtype)) + " " +
                        view.dims.to_string());
}

void merge_states(const AnyArray& v, const AnyArray& s, const AnyArray& out_v,
                  const AnyArray& out_s, const std::string& lse_base, const Where& pool) {
  const Arguments arguments("merge_states");
  const TensorView vectors = arguments.view(v, "v");
  const TensorView sums = arguments.view(s, "s");
  const ops::LseBase base = base_of(arguments, lse_base);
  const Executor executor = executor_of(pool);
  const bool valid = vectors.dims.rank() == 4;
  const Dims merged = valid ? Dims{vectors.dims[0], vectors.dims[2], vectors.dims[3]} : Dims{};
  const Dims merged_sums = valid ? Dims{merged[0], merged[1]} : Dims{};
  void* to_v = output(arguments, out_v, "out_v", merged, vectors.dtype, executor);
  void* to_s = output(arguments, out_s, "out_s", merged_sums, DType::f32, executor);
  const py::gil_scoped_release release;
  ops::merge_states(vectors, sums, base, to_v, static_cast<float*>(to_s), executor);
}

void merge_state(const AnyArray& v_a, const AnyArray& s_a, const AnyArray& v_b, const AnyArray& s_b,
                 const AnyArray& out_v, const AnyArray& out_s, const py::object& mask,
                 const std::string& lse_base, const Where& pool) {
  const Arguments arguments("merge_state");
  const TensorView first = arguments.view(v_a, "v_a");
  const TensorView first_sums = arguments.view(s_a, "s_a");
  const TensorView second = arguments.view(v_b, "v_b");
  const TensorView second_sums = arguments.view(s_b, "s_b");
  const TensorView rows = arguments.optional(mask, "mask");
  const ops::LseBase base = base_of(arguments, lse_base);
  const Executor executor = executor_of(pool);
  void* to_v = output(arguments, out_v, "out_v", first.dims, first.dtype, executor);
  void* to_s = output(arguments, out_s, "out_s", first_sums.dims, DType::f32, executor);
  const py::gil_scoped_release release;
  ops::merge_state(first, first_sums, second, second_sums, rows, base, to_v,
                   static_cast<float*>(to_s), executor);
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
