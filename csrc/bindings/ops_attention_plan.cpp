#include <pybind11/stl.h>

#include <cmath>
#include <optional>

#include "bindings/attention_arguments.h"
#include "bindings/device_array.h"
#include "bindings/module.h"
#include "effinfer/ops/attention.h"

namespace effinfer::bindings {
namespace {

using ops::AttentionPlan;

AttentionPlan make_plan(const py::array& qo_indptr, const py::array& kv_indptr,
                        const py::object& kv_indices, const py::array& kv_len, int32_t page_size,
                        int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim_qk,
                        int32_t head_dim_vo, bool causal, int32_t window_left, int32_t sink_tokens,
                        bool decode, const py::object& mask, const py::object& mask_indptr,
                        const py::object& lists, const py::object& blocks,
                        const py::object& span_masks, int64_t mask_row_stride) {
  const ops::AttentionGeometry geometry{num_qo_heads, num_kv_heads, head_dim_qk,
                                        head_dim_vo,  page_size,    causal,
                                        window_left,  sink_tokens,  decode};
  const AttentionArguments arguments("attention plan");
  ops::AttentionSequences sequences = arguments.sequences(qo_indptr, kv_indptr, kv_indices, kv_len);
  sequences.mask = arguments.optional(mask, "mask");
  sequences.mask_indptr = arguments.optional(mask_indptr, "mask_indptr");
  if (lists.is_none()) {
    const py::gil_scoped_release release;
    return AttentionPlan(geometry, sequences);
  }
  const auto both = py::cast<py::tuple>(blocks);
  const ops::AttentionLists given{arguments.optional(lists, "lists"),
                                  arguments.optional(both[0], "list_indptr"),
                                  arguments.optional(both[1], "spans"),
                                  arguments.optional(span_masks, "span_masks"), mask_row_stride};
  const py::gil_scoped_release release;
  return AttentionPlan(geometry, sequences, given);
}

void run(const AttentionPlan& plan, const AnyArray& q, const py::object& k, const py::object& v,
         const AnyArray& out, const py::object& lse, std::optional<float> sm_scale,
         float logits_soft_cap, const std::string& lse_base, const py::object& alibi_slopes,
         const py::object& k_scale, const py::object& v_scale, const py::object& q_rope,
         const py::object& k_rope, const py::object& sink_logits, const std::string& layout,
         const Where& pool) {
  const AttentionArguments arguments("attention");
  const float scale =
      sm_scale.value_or(1.0f / std::sqrt(static_cast<float>(plan.geometry().head_dim_qk)));
  ops::AttentionInputs inputs;
  static_cast<ops::LogitInputs&>(inputs) =
      arguments.logits(q, k, layout, scale, logits_soft_cap, k_scale);
  if (inputs.kv == nullptr) inputs.v = arguments.strided(v, "v");
  inputs.q_rope = arguments.strided(q_rope, "q_rope");
  inputs.k_rope = arguments.strided(k_rope, "k_rope");
  inputs.alibi_slopes = arguments.optional(alibi_slopes, "alibi_slopes");
  inputs.sink_logits = arguments.optional(sink_logits, "sink_logits");
  arguments.scale(v_scale, "v_scale", inputs.v_scale, inputs.v_scales);
  inputs.lse_factor = arguments.lse_factor(lse_base);
  const StridedView result = arguments.written(out, "out");
  const StridedView sums = arguments.written(lse, "lse");
  const py::gil_scoped_release release;
  plan.run(inputs, result, sums, executor_of(pool));
}

}  // namespace

void register_ops_attention_plan(py::module_& m) {
  py::class_<ops::FixedPlans>(m, "FixedPlans",
                              "A GPU's memory for plans that take each other's place.")
      .def(py::init<int64_t, int64_t>(), py::arg("most_listed"), py::arg("most_mask_bytes"));
  py::class_<AttentionPlan>(m, "AttentionPlan",
                            "Which rows of a batch visit which keys: made once for any number of "
                            "run() with tensors of those shapes.")
      .def(py::init(&make_plan), py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("kv_indices"),
           py::arg("kv_len"), py::kw_only(), py::arg("page_size"), py::arg("num_qo_heads"),
           py::arg("num_kv_heads"), py::arg("head_dim_qk"), py::arg("head_dim_vo"),
           py::arg("causal") = false, py::arg("window_left") = -1, py::arg("sink_tokens") = 0,
           py::arg("decode") = false, py::arg("mask") = py::none(),
           py::arg("mask_indptr") = py::none(), py::arg("lists") = py::none(),
           py::arg("blocks") = py::none(), py::arg("span_masks") = py::none(),
           py::arg("mask_row_stride") = 0)
      .def("run", &run, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
           py::arg("lse") = py::none(), py::kw_only(), py::arg("sm_scale") = py::none(),
           py::arg("logits_soft_cap") = 0.0f, py::arg("lse_base") = "log2",
           py::arg("alibi_slopes") = py::none(), py::arg("k_scale") = 1.0f,
           py::arg("v_scale") = 1.0f, py::arg("q_rope") = py::none(),
           py::arg("k_rope") = py::none(), py::arg("sink_logits") = py::none(),
           py::arg("layout") = "NHD", py::arg("pool") = py::none())
      .def(
          "put",
          [](AttentionPlan& plan, ops::FixedPlans& memory, const StreamQueue& queue) {
            const py::gil_scoped_release release;
            plan.put(memory, *queue.queue);
          },
          py::arg("memory"), py::arg("queue"),
          "Into memory whose addresses stay, behind all that the queue has.")
      .def_property_readonly("num_rows", &AttentionPlan::num_rows)
      .def_property_readonly("num_products", &AttentionPlan::num_products,
                             "Products of a query head's row with a key, masked ones included.")
      .def(
          "kernel",
          [](const AttentionPlan& plan, const std::string& q_dtype, const std::string& kv_dtype) {
            return plan.kernel(parse_dtype(q_dtype), parse_dtype(kv_dtype));
          },
          py::arg("q_dtype"), py::arg("kv_dtype"), "The kernel variant that run() takes.");
}

}  // namespace effinfer::bindings
