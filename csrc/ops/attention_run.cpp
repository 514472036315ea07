// Running an AttentionPlan: the tensors of a call, checked, and the kernel.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "effinfer/ops/attention.h"
#include "ops/attention_plan.h"
#include "ops/attention_tensors.h"
#include "ops/registry.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

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

void check_results(const Validator& check, const AttentionInputs& inputs,
                   const AttentionPlan::Impl& plan, const StridedView& out,
                   const StridedView& lse) {
  const AttentionGeometry& g = plan.geometry;
  check.expect(out.dtype == inputs.q.dtype, "out",
               "q's dtype, " + std::string(name(inputs.q.dtype)), name(out.dtype));
  check.shape("out", out, {plan.num_rows(), g.num_qo_heads, g.head_dim_vo});
  check.expect(is_dense(out), "out", "a C-contiguous array", "strides");
  if (lse.dims.rank() == 0) return;
  check.dtype("lse", lse, DType::f32);
  check.shape("lse", lse, {plan.num_rows(), g.num_qo_heads});
  check.expect(is_dense(lse), "lse", "a C-contiguous array", "strides");
}

// What no kernel of a GPU has, before tensors are looked at.
void check_on_gpu(const Validator& check, const AttentionInputs& inputs) {
  check.expect(inputs.kv == nullptr, "kv", "arrays on a GPU", "a PagedKv, which the host has");
}

// Dimensions of k_rope, 0 without one. Pages of a PagedKv hold whole keys.
int32_t rope_dims(const Validator& check, const AttentionInputs& inputs,
                  const AttentionGeometry& g) {
  const bool has_rope = inputs.k_rope.dims.rank() > 0;
  if (inputs.kv != nullptr) {
    check.expect(!has_rope, "k_rope", "None with PagedKv", "an array");
    check.expect(inputs.q_rope.dims.rank() == 0, "q_rope", "None with PagedKv", "an array");
    return 0;
  }
  check.expect(has_rope == (inputs.q_rope.dims.rank() > 0), "q_rope",
               has_rope ? "an array, with k_rope" : "None without k_rope",
               has_rope ? "None" : "an array");
  if (!has_rope) return 0;
  const Dims& dims = inputs.k_rope.dims;
  check.expect(dims[dims.rank() - 1] < g.head_dim_qk, "k_rope",
               "fewer than " + std::to_string(g.head_dim_qk) + " dimensions a head",
               dims.to_string());
  const auto rope = static_cast<int32_t>(dims[dims.rank() - 1]);
  check.expect((g.head_dim_qk - rope) % 16 == 0, "k", "a multiple of 16 dimensions beside k_rope",
               std::to_string(g.head_dim_qk - rope));
  return rope;
}

AttentionProblem make_problem(const Validator& check, const AttentionInputs& inputs,
                              const AttentionPlan::Impl& plan) {
  const AttentionGeometry& g = plan.geometry;
  const AttentionTensors tensors(check, plan, inputs.order);
  const int32_t rope = rope_dims(check, inputs, g);
  AttentionProblem p;
  static_cast<AttentionLogits&>(p) = tensors.logits(inputs, g.head_dim_qk - rope);
  const auto same_dtype = [&](std::string_view argument, const KvRows& rows) {
    check.expect(rows.dtype == p.k.dtype, argument, "k's dtype, " + std::string(name(p.k.dtype)),
                 name(rows.dtype));
  };
  if (inputs.kv != nullptr) {
    p.v = values_of(tensors.pages(*inputs.kv));
  } else {
    p.v = tensors.kv_rows("v", inputs.v, g.head_dim_vo);
    same_dtype("v", p.v);
    tensors.add_scales("v_scale", inputs.v_scales, p.v);
  }
  if (rope > 0) {
    p.q_rope = tensors.query_rows("q_rope", inputs.q_rope, rope);
    p.k_rope = tensors.kv_rows("k_rope", inputs.k_rope, rope);
    same_dtype("k_rope", p.k_rope);
  }
  p.sink_tokens = g.sink_tokens;
  p.decode = g.decode;
  if (plan.has_mask) p.mask = plan.mask.data();
  p.mask_bytes = static_cast<int64_t>(plan.mask.size());
  if (!plan.mask_starts.empty()) p.mask_starts = plan.mask_starts.data();
  p.mask_row_strides = plan.mask_row_strides.data();
  check.finite("v_scale", inputs.v_scale);
  p.v_scale = inputs.v_scale;
  p.alibi_slopes = per_head(check, "alibi_slopes", inputs.alibi_slopes, g.num_qo_heads);
  p.sink_logits = per_head(check, "sink_logits", inputs.sink_logits, g.num_qo_heads);
  p.out_stride = int64_t{g.num_qo_heads} * g.head_dim_vo;
  p.lse_factor = inputs.lse_factor;
  if (inputs.q.device == Device{}) p.arithmetic = arithmetic_of_products(p);
  return p;
}

}  // namespace

void AttentionPlan::run(const AttentionInputs& inputs, const StridedView& out,
                        const StridedView& lse, const Executor& executor) const {
  const Validator check("attention", executor.device());
  Queue* const queue = executor.queue();
  if (queue != nullptr) check_on_gpu(check, inputs);
  AttentionProblem problem = make_problem(check, inputs, *impl_);
  check_results(check, inputs, *impl_, out, lse);
  if (impl_->work.tiles.empty()) return;
  problem.out = static_cast<uint8_t*>(out.data);
  problem.lse = static_cast<float*>(lse.data);
  if (queue == nullptr) return run_work(problem, impl_->work, *executor.pool());
  // Before anything is uploaded for a problem that no kernel takes.
  const Target target = current_target(queue->device());
  table<AttentionProblem>().select(problem, target);
  check_aligned(check, "q", inputs.q);
  check_aligned(check, "k", inputs.k);
  check_aligned(check, "v", inputs.v);
  check_aligned(check, "q_rope", inputs.q_rope);
  check_aligned(check, "k_rope", inputs.k_rope);
  check_aligned(check, "out", out);
  impl_->device_plans->place(problem, impl_->shape(), impl_->lists(), *queue);
  table<AttentionProblem>().select(problem, target).launch(problem, *queue);
}

std::string AttentionPlan::kernel(DType q_dtype, DType kv_dtype) const {
  const AttentionGeometry& g = impl_->geometry;
  AttentionProblem problem;
  problem.source = KeySource::rows;
  problem.num_qo_heads = g.num_qo_heads;
  problem.num_kv_heads = g.num_kv_heads;
  problem.q.dtype = q_dtype;
  problem.k.dtype = problem.v.dtype = kv_dtype;
  problem.k.dims = g.head_dim_qk;
  problem.v.dims = g.head_dim_vo;
  problem.decode = g.decode;
  problem.arithmetic = arithmetic_of_products(problem);
  return table<AttentionProblem>().select(problem, current_target()).name;
}

}  // namespace effinfer::ops
