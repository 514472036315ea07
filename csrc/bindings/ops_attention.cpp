#include <pybind11/stl.h>

#include <cmath>

#include "bindings/attention_arguments.h"
#include "bindings/module.h"
#include "effinfer/ops/attention.h"
#include "effinfer/ops/visits.h"

namespace effinfer::bindings {
namespace {

using ops::PagedKv;
using Pool = std::shared_ptr<ThreadPool>;

void kv_append(PagedKv& kv, const py::array& k, const py::array& v, const py::array& qo_indptr,
               const py::array& kv_indptr, const py::array& kv_indices, const py::array& kv_len,
               const Pool& pool) {
  const AttentionArguments arguments("kv_append");
  const TensorView keys = arguments.view(k, "k");
  const TensorView values = arguments.view(v, "v");
  const ops::PagedBatch batch = arguments.batch(qo_indptr, kv_indptr, kv_indices, kv_len);
  const py::gil_scoped_release release;
  ops::kv_append(kv, keys, values, batch, pool_or_default(pool));
}

py::array_t<float> rope_append(PagedKv& kv, const py::array& q, const py::array& k,
                               const py::array& v, const py::array& table,
                               const py::array& qo_indptr, const py::array& kv_indptr,
                               const py::array& kv_indices, const py::array& kv_len,
                               const py::object& q_norm, const py::object& k_norm, float eps,
                               bool interleaved, const Pool& pool) {
  const AttentionArguments arguments("rope_append");
  const TensorView queries = arguments.view(q, "q");
  const TensorView keys = arguments.view(k, "k");
  const TensorView values = arguments.view(v, "v");
  const TensorView angles = arguments.view(table, "table");
  const ops::PagedBatch batch = arguments.batch(qo_indptr, kv_indptr, kv_indices, kv_len);
  const ops::RopeAppendOptions options{arguments.optional(q_norm, "q_norm"),
                                       arguments.optional(k_norm, "k_norm"), eps, interleaved};
  py::array_t<float> out = new_array(queries.dims);
  float* data = out.mutable_data();
  const py::gil_scoped_release release;
  ops::rope_append(kv, queries, keys, values, angles, batch, options, data, pool_or_default(pool));
  return out;
}

py::object paged_attention(const py::array& q, const PagedKv& kv, const py::array& qo_indptr,
                           const py::array& kv_indptr, const py::array& kv_indices,
                           const py::array& kv_len, std::optional<float> sm_scale,
                           int32_t window_left, int32_t sink_tokens, float logits_soft_cap,
                           const py::object& parents, const std::string& arithmetic,
                           const ops::Visits* visits, const py::object& alibi_slopes,
                           const py::object& sink_logits, int32_t chunk, const py::object& q_before,
                           const py::object& q_far, bool return_lse, const std::string& lse_base,
                           const Pool& pool) {
  const AttentionArguments arguments("paged_attention");
  const TensorView queries = arguments.view(q, "q");
  const ops::PagedBatch batch = arguments.batch(qo_indptr, kv_indptr, kv_indices, kv_len);
  ops::PagedAttentionOptions options;
  options.sm_scale = sm_scale.value_or(1.0f / std::sqrt(static_cast<float>(kv.head_dim())));
  options.window_left = window_left;
  options.sink_tokens = sink_tokens;
  options.logits_soft_cap = logits_soft_cap;
  options.parents = arguments.optional(parents, "parents");
  options.arithmetic = parse_dtype(arithmetic);
  options.visits = visits;
  options.alibi_slopes = arguments.optional(alibi_slopes, "alibi_slopes");
  options.sink_logits = arguments.optional(sink_logits, "sink_logits");
  options.chunk = chunk;
  options.q_before = arguments.optional(q_before, "q_before");
  options.q_far = arguments.optional(q_far, "q_far");
  options.lse_factor = arguments.lse_factor(lse_base);
  py::array_t<float> out = new_array(queries.dims);
  const bool known = return_lse && queries.dims.rank() == 3;
  py::array_t<float> lse = new_array({known ? queries.dims[0] : 0, known ? queries.dims[1] : 0});
  if (known) options.lse = lse.mutable_data();
  float* data = out.mutable_data();
  {
    const py::gil_scoped_release release;
    ops::paged_attention(queries, kv, batch, options, data, pool_or_default(pool));
  }
  if (!return_lse) return out;
  return py::make_tuple(out, lse);
}

py::tuple read_all(const PagedKv& kv) {
  const Dims dims = {kv.num_pages(), kv.num_kv_heads(), PagedKv::kPageSize, kv.head_dim()};
  py::array_t<float> k = new_array(dims);
  py::array_t<float> v = new_array(dims);
  float* k_data = k.mutable_data();
  float* v_data = v.mutable_data();
  {
    const py::gil_scoped_release release;
    kv.read(k_data, v_data);
  }
  return py::make_tuple(k, v);
}

}  // namespace

void register_paged_kv(py::module_& m) {
  py::class_<PagedKv>(m, "PagedKv",
                      "Keys and values of one layer in pages of 64 tokens, in the order of the "
                      "attention kernels; dtype f32, f16, bf16 or i8.")
      .def(py::init([](int32_t num_pages, int32_t num_kv_heads, int32_t head_dim,
                       const std::string& dtype) {
             return PagedKv(num_pages, num_kv_heads, head_dim, parse_dtype(dtype));
           }),
           py::arg("num_pages"), py::arg("num_kv_heads"), py::arg("head_dim"),
           py::arg("dtype") = "bf16")
      .def_property_readonly("num_pages", &PagedKv::num_pages)
      .def_property_readonly("num_kv_heads", &PagedKv::num_kv_heads)
      .def_property_readonly("head_dim", &PagedKv::head_dim)
      .def_property_readonly("dtype", [](const PagedKv& kv) { return name(kv.dtype()); })
      .def_property_readonly_static("page_size", [](const py::object&) { return 64; })
      .def("to_numpy", &read_all, "(k, v), float32 [num_pages, num_kv_heads, 64, head_dim].");
}

void register_ops_attention(py::module_& m) {
  m.def("kv_append", &kv_append, py::arg("kv"), py::arg("k"), py::arg("v"), py::arg("qo_indptr"),
        py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"),
        py::arg("pool") = py::none());
  m.def("rope_append", &rope_append, py::arg("kv"), py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("table"), py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("kv_indices"),
        py::arg("kv_len"), py::kw_only(), py::arg("q_norm") = py::none(),
        py::arg("k_norm") = py::none(), py::arg("eps") = 1e-6f, py::arg("interleaved") = false,
        py::arg("pool") = py::none());
  m.def("paged_attention", &paged_attention, py::arg("q"), py::arg("kv"), py::arg("qo_indptr"),
        py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"), py::kw_only(),
        py::arg("sm_scale") = py::none(), py::arg("window_left") = -1, py::arg("sink_tokens") = 0,
        py::arg("logits_soft_cap") = 0.0f, py::arg("parents") = py::none(),
        py::arg("arithmetic") = "f32", py::arg("visits") = py::none(),
        py::arg("alibi_slopes") = py::none(), py::arg("sink_logits") = py::none(),
        py::arg("chunk") = 0, py::arg("q_before") = py::none(), py::arg("q_far") = py::none(),
        py::arg("return_lse") = false, py::arg("lse_base") = "log2", py::arg("pool") = py::none());
}

}  // namespace effinfer::bindings
