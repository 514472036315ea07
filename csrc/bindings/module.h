// What the binding files share. Each part of the library has one file and one register function.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "effinfer/threads.h"

namespace effinfer::bindings {

namespace py = pybind11;

void register_errors(py::module_& m);
void register_arrays(py::module_& m);
void register_device_array(py::module_& m);
void register_device(py::module_& m);
void register_log(py::module_& m);
void register_tuning(py::module_& m);
void register_weights(py::module_& m);
void register_gguf(py::module_& m);
void register_quantize(py::module_& m);
void register_graph(py::module_& m);
void register_compiler(py::module_& m);
void register_profile(py::module_& m);
void register_sampling(py::module_& m);
void register_kv_cache(py::module_& m);
void register_speculation(py::module_& m);
void register_speculation_parts(py::module_& m);
void register_hooks(py::module_& m);
void register_engine(py::module_& m);
void register_ops_matmul(py::module_& m);
void register_ops_attention(py::module_& m);
void register_paged_kv(py::module_& m);
void register_ops_visits(py::module_& m);
void register_ops_attention_plan(py::module_& m);
void register_ops_scores(py::module_& m);
void register_ops_index(py::module_& m);
void register_ops_elementwise(py::module_& m);
void register_ops_state(py::module_& m);
void register_ops_page(py::module_& m);
void register_ops_sampling(py::module_& m);
void register_ops_norm(py::module_& m);
void register_ops_rope(py::module_& m);

// The pool that operators use when the caller gives none: made at first use, with
// default_threads(); a forked child makes its own.
ThreadPool& default_pool();
inline ThreadPool& pool_or_default(const std::shared_ptr<ThreadPool>& pool) {
  return pool ? *pool : default_pool();
}

}  // namespace effinfer::bindings
