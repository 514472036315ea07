// The Python module: each register_*() binds one part of the library.
#include "bindings/module.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "The native core of effinfer.";
  effinfer::bindings::register_errors(m);
  effinfer::bindings::register_device_array(m);
  effinfer::bindings::register_arrays(m);
  effinfer::bindings::register_device(m);
  effinfer::bindings::register_log(m);
  effinfer::bindings::register_tuning(m);
  effinfer::bindings::register_weights(m);
  effinfer::bindings::register_gguf(m);
  effinfer::bindings::register_quantize(m);
  effinfer::bindings::register_graph(m);
  effinfer::bindings::register_kv_cache(m);
  effinfer::bindings::register_profile(m);
  effinfer::bindings::register_compiler(m);
  effinfer::bindings::register_sampling(m);
  effinfer::bindings::register_speculation(m);
  effinfer::bindings::register_hooks(m);
  effinfer::bindings::register_engine(m);
  effinfer::bindings::register_ops_matmul(m);
  effinfer::bindings::register_paged_kv(m);
  effinfer::bindings::register_ops_visits(m);
  effinfer::bindings::register_ops_attention(m);
  effinfer::bindings::register_ops_attention_plan(m);
  effinfer::bindings::register_ops_scores(m);
  effinfer::bindings::register_ops_index(m);
  effinfer::bindings::register_ops_elementwise(m);
  effinfer::bindings::register_ops_state(m);
  effinfer::bindings::register_ops_page(m);
  effinfer::bindings::register_ops_sampling(m);
  effinfer::bindings::register_ops_norm(m);
  effinfer::bindings::register_ops_rope(m);
}
