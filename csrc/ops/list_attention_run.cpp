// Running an AttentionPlan: the tensors of a call, checked, and the kernel.
#include <cmath>
#include <memory>
#include <string>

#include "effinfer/ops/list_attention.h"
#include "ops/attention_tensors.h"
#include "ops/list_plans.h"
#include "ops/registry.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

const Validator kCheck("attention");

// An empty array may have any strides.
bool is_dense(const StridedView& view) {
  if (view.dims.num_elements() == 0) return true;
  int64_t stride = 1;
  for (int axis = view.dims.rank() - 1; axis >= 0; --axis) {
    if (view.dims[axis] > 1 && view.stride(axis) != stride) return false;
    stride *= view.dims[axis];
  }
  return true;
}

void check_shape(std::string_view argument, const StridedView& view, const Dims& expected) {
  kCheck.expect(view.dims == expected, argument, "shape " + expected.to_string(),
                view.dims.to_string());
}

void check_numbers(const AttentionInputs& inputs) {
  const auto finite = [](std::string_view argument, float value) {
    kCheck.expect(std::isfinite(value), argument, "a finite number", std::to_string(value));
  };
  finite("sm_scale", inputs.sm_scale);
  finite("k_scale", inputs.k_scale);
  finite("v_scale", inputs.v_scale);
  kCheck.expect(std::isfinite(inputs.logits_soft_cap) && inputs.logits_soft_cap >= 0.0f,
                "logits_soft_cap", "a number >= 0", std::to_string(inputs.logits_soft_cap));
}

void check_results(const AttentionInputs& inputs, const AttentionPlan::Impl& plan,
                   const StridedView& out, const StridedView& lse) {
  const AttentionGeometry& g = plan.geometry;
  kCheck.expect(out.dtype == inputs.q.dtype, "out",
                "q's dtype, " + std::string(name(inputs.q.dtype)), name(out.dtype));
  check_shape("out", out, {plan.num_rows(), g.num_qo_heads, g.head_dim_vo});
  kCheck.expect(is_dense(out), "out", "a C-contiguous array", "strides");
  if (lse.dims.rank() == 0) return;
  kCheck.expect(lse.dtype == DType::f32, "lse", "dtype f32", name(lse.dtype));
  check_shape("lse", lse, {plan.num_rows(), g.num_qo_heads});
  kCheck.expect(is_dense(lse), "lse", "a C-contiguous array", "strides");
}

ListAttentionProblem make_problem(const AttentionInputs& inputs, const AttentionPlan::Impl& plan) {
  const AttentionGeometry& g = plan.geometry;
  ListAttentionProblem p;
  const bool has_rope = inputs.k_rope.dims.rank() > 0;
  kCheck.expect(has_rope == (inputs.q_rope.dims.rank() > 0), "q_rope",
                has_rope ? "an array, with k_rope" : "None without k_rope",
                has_rope ? "None" : "an array");
  int32_t rope_dims = 0;
  if (has_rope) {
    const Dims& dims = inputs.k_rope.dims;
    kCheck.expect(dims.rank() > 0 && dims[dims.rank() - 1] < g.head_dim_qk, "k_rope",
                  "fewer than " + std::to_string(g.head_dim_qk) + " dimensions a head",
                  dims.to_string());
    rope_dims = static_cast<int32_t>(dims[dims.rank() - 1]);
    kCheck.expect((g.head_dim_qk - rope_dims) % 16 == 0, "k",
                  "a multiple of 16 dimensions beside k_rope",
                  std::to_string(g.head_dim_qk - rope_dims));
  }
  const AttentionTensors tensors(kCheck, plan, inputs.order);
  p.q = tensors.query_rows("q", inputs.q, g.head_dim_qk - rope_dims);
  p.k = tensors.kv_rows("k", inputs.k, g.head_dim_qk - rope_dims);
  p.v = tensors.kv_rows("v", inputs.v, g.head_dim_vo);
  kCheck.expect(p.v.dtype == p.k.dtype, "v", "k's dtype, " + std::string(name(p.k.dtype)),
                name(p.v.dtype));
  if (has_rope) {
    p.q_rope = tensors.query_rows("q_rope", inputs.q_rope, rope_dims);
    p.k_rope = tensors.kv_rows("k_rope", inputs.k_rope, rope_dims);
    kCheck.expect(p.k_rope.dtype == p.k.dtype, "k_rope",
                  "k's dtype, " + std::string(name(p.k.dtype)), name(p.k_rope.dtype));
  }
  tensors.add_scales("k_scale", inputs.k_scales, p.k);
  tensors.add_scales("v_scale", inputs.v_scales, p.v);
  p.num_qo_heads = g.num_qo_heads;
  p.num_kv_heads = g.num_kv_heads;
  p.qo_indptr = plan.qo_indptr.data();
  p.kv_indptr = plan.kv_indptr.data();
  if (plan.paged) p.pages = plan.kv_indices.data();
  p.page_size = g.page_size;
  p.kv_len = plan.kv_len.data();
  p.causal = g.causal;
  p.window_left = g.window_left;
  if (plan.has_mask) p.mask = plan.mask.data();
  p.mask_bytes = static_cast<int64_t>(plan.mask.size());
  p.mask_row_strides = plan.mask_row_strides.data();
  p.sm_scale = inputs.sm_scale * inputs.k_scale;
  p.logits_soft_cap = inputs.logits_soft_cap;
  p.v_scale = inputs.v_scale;
  if (inputs.alibi_slopes.dims.rank() > 0) {
    kCheck.dtype("alibi_slopes", inputs.alibi_slopes, DType::f32);
    kCheck.shape("alibi_slopes", inputs.alibi_slopes, {g.num_qo_heads});
    p.alibi_slopes = static_cast<const float*>(inputs.alibi_slopes.data);
  }
  if (inputs.sinks.dims.rank() > 0) {
    kCheck.dtype("sinks", inputs.sinks, DType::f32);
    kCheck.shape("sinks", inputs.sinks, {g.num_qo_heads});
    p.sinks = static_cast<const float*>(inputs.sinks.data);
  }
  p.plan = &plan.plan;
  p.lse_factor = inputs.lse_factor;
  return p;
}

}  // namespace

void AttentionPlan::run(const AttentionInputs& inputs, const StridedView& out,
                        const StridedView& lse, ThreadPool& pool) const {
  check_numbers(inputs);
  ListAttentionProblem problem = make_problem(inputs, *impl_);
  check_results(inputs, *impl_, out, lse);
  const ListPlan& plan = impl_->plan;
  if (plan.tiles.empty()) return;
  problem.out = static_cast<uint8_t*>(out.data);
  problem.lse = static_cast<float*>(lse.data);
  const auto partials = static_cast<size_t>(plan.num_partials);
  const auto dim_vo = static_cast<size_t>((impl_->geometry.head_dim_vo + 15) / 16 * 16);
  const auto partial_out = std::make_unique_for_overwrite<float[]>(partials * dim_vo);
  const auto partial_ms = std::make_unique_for_overwrite<float[]>(partials * 2);
  std::vector<int32_t> done(plan.merges.size());
  problem.partial_out = partial_out.get();
  problem.partial_ms = partial_ms.get();
  problem.done = done.data();
  run_alone(problem, pool);
}

const char* AttentionPlan::kernel(DType q_dtype, DType kv_dtype) const {
  ListAttentionProblem problem;
  problem.q.dtype = q_dtype;
  problem.k.dtype = kv_dtype;
  return table<ListAttentionProblem>().select(problem, current_isa()).name.c_str();
}

}  // namespace effinfer::ops
