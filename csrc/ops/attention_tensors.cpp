#include "ops/attention_tensors.h"

#include <cmath>
#include <memory>
#include <string>

#include "ops/bf16_products.h"
#include "ops/paged_batch.h"
#include "ops/registry.h"

namespace effinfer::ops {

void AttentionTensors::check_rows(std::string_view argument, const StridedView& view) const {
  check_.data(argument, view);
  check_.expect(view.contiguous_rows(), argument, "a contiguous last dimension",
                "stride " + std::to_string(view.stride(view.dims.rank() - 1)));
}

AttentionLogits AttentionTensors::logits(const LogitInputs& inputs, int32_t dims) const {
  check_logits(check_, inputs.sm_scale, inputs.logits_soft_cap);
  check_.finite("k_scale", inputs.k_scale);
  AttentionLogits logits;
  logits.q = query_rows("q", inputs.q, dims);
  if (inputs.kv != nullptr) {
    logits.source = KeySource::pages;
    logits.k = keys_of(pages(*inputs.kv));
  } else {
    logits.source = KeySource::rows;
    logits.k = kv_rows("k", inputs.k, dims);
    add_scales("k_scale", inputs.k_scales, logits.k);
  }
  const AttentionGeometry& g = plan_.geometry;
  logits.num_qo_heads = g.num_qo_heads;
  logits.num_kv_heads = g.num_kv_heads;
  logits.batch = plan_.batch();
  logits.page_size = g.page_size;
  logits.causal = g.causal;
  logits.window_left = g.window_left;
  logits.sm_scale = inputs.sm_scale * inputs.k_scale;
  logits.logits_soft_cap = inputs.logits_soft_cap;
  return logits;
}

// The first dimension may be larger than the plan needs.
void AttentionTensors::check_dims(std::string_view argument, const StridedView& x,
                                  const Dims& last) const {
  const AttentionGeometry& g = plan_.geometry;
  Dims expected = {x.dims.rank() > 0 && x.dims[0] > plan_.num_kv_rows ? x.dims[0]
                                                                      : plan_.num_kv_rows};
  if (plan_.paged && order_ == KvOrder::nhd) expected.push_back(g.page_size);
  expected.push_back(g.num_kv_heads);
  if (plan_.paged && order_ == KvOrder::hnd) expected.push_back(g.page_size);
  if (last.rank() > 0) expected.push_back(last[0]);
  check_.expect(x.dims == expected, argument,
                "shape " + expected.to_string() + " (or more " + (plan_.paged ? "pages)" : "rows)"),
                x.dims.to_string());
}

QueryRows AttentionTensors::query_rows(std::string_view argument, const StridedView& q,
                                       int32_t dims) const {
  check_.row_type(argument, q.dtype);
  check_.shape(argument, q, {plan_.num_rows(), plan_.geometry.num_qo_heads, dims});
  check_rows(argument, q);
  return {static_cast<const uint8_t*>(q.data), q.dtype, dims, q.stride(0), q.stride(1)};
}

KvRows AttentionTensors::kv_rows(std::string_view argument, const StridedView& x,
                                 int32_t dims) const {
  check_.expect(is_kv_type(x.dtype), argument, "dtype f32, f16, bf16, i8, f8_e4m3 or f8_e5m2",
                name(x.dtype));
  check_dims(argument, x, {dims});
  check_rows(argument, x);
  KvRows rows;
  rows.data = static_cast<const uint8_t*>(x.data);
  rows.dtype = x.dtype;
  rows.dims = dims;
  const int64_t size = dtype_info(x.dtype).block_bytes;
  rows.page_stride = plan_.paged ? x.stride(0) * size : 0;
  rows.token_stride = x.stride(token_axis()) * size;
  rows.head_stride = x.stride(head_axis()) * size;
  return rows;
}

void AttentionTensors::add_scales(std::string_view argument, const StridedView& x,
                                  KvRows& rows) const {
  if (x.dims.rank() == 0) return;
  check_.dtype(argument, x, DType::f32);
  check_dims(argument, x, {});
  rows.scales = static_cast<const float*>(x.data);
  rows.scale_page_stride = plan_.paged ? x.stride(0) : 0;
  rows.scale_token_stride = x.stride(token_axis());
  rows.scale_head_stride = x.stride(head_axis());
}

const KvLayer& AttentionTensors::pages(const PagedKv& kv) const {
  const AttentionGeometry& g = plan_.geometry;
  const bool fits = plan_.paged && g.page_size == PagedKv::kPageSize &&
                    g.num_kv_heads == kv.num_kv_heads() && g.head_dim_qk == kv.head_dim() &&
                    g.head_dim_vo == kv.head_dim() && plan_.num_kv_rows <= kv.num_pages();
  check_.expect(fits, "kv",
                "at least " + std::to_string(plan_.num_kv_rows) + " pages of the plan's " +
                    std::to_string(g.page_size) + " tokens, " + std::to_string(g.num_kv_heads) +
                    " heads of " + std::to_string(g.head_dim_qk),
                std::to_string(kv.num_pages()) + " pages of 64 tokens, " +
                    std::to_string(kv.num_kv_heads()) + " heads of " +
                    std::to_string(kv.head_dim()));
  return layer_of(kv);
}

void check_logits(const Validator& check, float sm_scale, float logits_soft_cap) {
  check.finite("sm_scale", sm_scale);
  check.expect(std::isfinite(logits_soft_cap) && logits_soft_cap >= 0.0f, "logits_soft_cap",
               "a number >= 0", std::to_string(logits_soft_cap));
}

void check_aligned(const Validator& check, std::string_view argument, const StridedView& view) {
  if (view.dims.num_elements() == 0) return;
  const int64_t size = dtype_info(view.dtype).block_bytes;
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int axis = 0; axis + 1 < view.dims.rank(); ++axis) {
    aligned = aligned && (view.dims[axis] < 2 || view.stride(axis) * size % 16 == 0);
  }
  check.expect(aligned, argument, "rows that begin at multiples of 16 bytes on a GPU", "others");
}

const float* per_head(const Validator& check, std::string_view argument, const TensorView& view,
                      int64_t num_qo_heads) {
  if (view.dims.rank() == 0 || view.data == nullptr) return nullptr;
  check.dtype(argument, view, DType::f32);
  check.shape(argument, view, {num_qo_heads});
  return static_cast<const float*>(view.data);
}

Arithmetic arithmetic_of_products(AttentionProblem problem) {
  if (problem.q.dtype != DType::bf16) return Arithmetic::f32;
  problem.arithmetic = Arithmetic::bf16;
  return bf16_pays(problem, current_target()) ? Arithmetic::bf16 : Arithmetic::f32;
}

void run_work(AttentionProblem& problem, const AttentionWork& work, ThreadPool& pool) {
  const auto partials = static_cast<size_t>(work.num_partials);
  const auto dim = static_cast<size_t>((problem.v.dims + 15) / 16 * 16);
  const auto partial_out = std::make_unique_for_overwrite<float[]>(partials * dim);
  const auto partial_ms = std::make_unique_for_overwrite<float[]>(partials * 2);
  std::vector<int32_t> done(work.merges.size());
  problem.work = work;
  problem.partial_out = partial_out.get();
  problem.partial_ms = partial_ms.get();
  problem.done = done.data();
  run_alone(problem, pool);
}

void plan_and_run(AttentionProblem& p, ThreadPool& pool) {
  AttentionWork work;
  plan_attention({p.source, p.num_qo_heads, p.num_kv_heads, p.v.dims, p.causal, p.window_left,
                  p.sink_tokens, p.visits.list_words > 0, p.visits.num_rows > 0, p.chunk},
                 p.batch, work);
  run_work(p, work, pool);
}

}  // namespace effinfer::ops
