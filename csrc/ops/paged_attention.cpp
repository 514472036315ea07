#include <algorithm>
#include <cmath>
#include <vector>

#include "effinfer/ops/attention.h"
#include "effinfer/ops/visits.h"
#include "ops/attention.h"
#include "ops/paged_batch.h"
#include "ops/registry.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

const int32_t* ints(const TensorView& view) {
  return static_cast<const int32_t*>(view.data);
}
const float* floats(const TensorView& view) {
  return static_cast<const float*>(view.data);
}

void check_keys(const Validator& check, std::string_view argument, const TensorView& x,
                int64_t tokens, const PagedKv& kv) {
  check.dtype(argument, x, DType::f32);
  check.shape(argument, x, {tokens, kv.num_kv_heads(), kv.head_dim()});
}

RopeAppendProblem append_problem(const Validator& check, const PagedKv& kv, const TensorView& k,
                                 const TensorView& v, const PagedBatch& batch, int64_t tokens) {
  check_keys(check, "k", k, tokens, kv);
  check_keys(check, "v", v, tokens, kv);
  RopeAppendProblem problem;
  problem.k = floats(k);
  problem.v = floats(v);
  problem.k_stride = problem.v_stride = static_cast<int64_t>(kv.num_kv_heads()) * kv.head_dim();
  problem.kv = kv.layer();
  problem.batch = check_batch(check, batch, tokens, kv);
  return problem;
}

const float* check_norm(const Validator& check, std::string_view argument, const TensorView& weight,
                        const PagedKv& kv) {
  if (weight.data == nullptr) return nullptr;
  check.dtype(argument, weight, DType::f32);
  check.shape(argument, weight, {kv.head_dim()});
  return floats(weight);
}

// A bit for each row of the sequence that a row descends from, and its own.
std::vector<uint64_t> ancestors_of(const Validator& check, const TensorView& parents,
                                   const BatchLayout& batch) {
  if (parents.data == nullptr) return {};
  check.dtype("parents", parents, DType::i32);
  check.shape("parents", parents, {batch.num_tokens});
  std::vector<uint64_t> ancestors(static_cast<size_t>(batch.num_tokens));
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int32_t first = batch.qo_indptr[s];
    const int32_t rows = batch.qo_indptr[s + 1] - first;
    check.expect(rows <= 64, "parents", "at most 64 rows a sequence", std::to_string(rows));
    for (int32_t i = 0; i < rows; ++i) {
      const int32_t parent = ints(parents)[first + i];
      check.expect(parent >= -1 && parent < i, "parents[" + std::to_string(first + i) + "]",
                   "-1 to " + std::to_string(i - 1), std::to_string(parent));
      const uint64_t above = parent < 0 ? 0 : ancestors[static_cast<size_t>(first + parent)];
      ancestors[static_cast<size_t>(first + i)] = above | uint64_t{1} << i;
    }
  }
  return ancestors;
}

}  // namespace

void kv_append(PagedKv& kv, const TensorView& k, const TensorView& v, const PagedBatch& batch,
               ThreadPool& pool) {
  const Validator check("kv_append");
  check.rank("k", k, 3);
  run_alone(append_problem(check, kv, k, v, batch, k.dims[0]), pool);
}

void rope_append(PagedKv& kv, const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& table, const PagedBatch& batch, const RopeAppendOptions& options,
                 float* q_out, ThreadPool& pool) {
  const Validator check("rope_append");
  const int32_t heads = check_queries(check, q, kv);
  const int64_t tokens = q.dims[0];
  check.dtype("table", table, DType::f32);
  const bool matches = table.dims.rank() == 3 && table.dims[0] == tokens && table.dims[1] == 2 &&
                       2 * table.dims[2] <= kv.head_dim();
  check.expect(matches, "table",
               "shape [" + std::to_string(tokens) + ", 2, at most " +
                   std::to_string(kv.head_dim() / 2) + "]",
               table.dims.to_string());
  RopeAppendProblem problem = append_problem(check, kv, k, v, batch, tokens);
  problem.q = floats(q);
  problem.q_out = q_out;
  problem.q_stride = problem.q_out_stride = static_cast<int64_t>(heads) * kv.head_dim();
  problem.num_qo_heads = heads;
  problem.q_norm = check_norm(check, "q_norm", options.q_norm, kv);
  problem.k_norm = check_norm(check, "k_norm", options.k_norm, kv);
  problem.norm_eps = options.norm_eps;
  problem.cos_sin = floats(table);
  problem.rope_dims = static_cast<int32_t>(2 * table.dims[2]);
  problem.interleaved = options.interleaved;
  run_alone(problem, pool);
}

void paged_attention(const TensorView& q, const PagedKv& kv, const PagedBatch& batch,
                     const AttentionOptions& options, float* out, ThreadPool& pool) {
  const Validator check("paged_attention");
  const int32_t heads = check_queries(check, q, kv);
  check.expect(std::isfinite(options.sm_scale), "scale", "a finite number",
               std::to_string(options.sm_scale));
  check.expect(std::isfinite(options.logits_soft_cap) && options.logits_soft_cap >= 0.0f,
               "soft_cap", "a number >= 0", std::to_string(options.logits_soft_cap));
  check.expect(options.window_left >= -1, "window_left", "-1 or more",
               std::to_string(options.window_left));
  check.expect(options.arithmetic == DType::f32 || options.arithmetic == DType::bf16, "arithmetic",
               "f32 or bf16", std::string(name(options.arithmetic)));
  check.expect(options.sinks >= 0, "sinks", "0 or more", std::to_string(options.sinks));
  AttentionProblem problem;
  problem.batch = check_batch(check, batch, q.dims[0], kv);
  const std::vector<uint64_t> ancestors = ancestors_of(check, options.parents, problem.batch);
  if (problem.batch.num_tokens == 0) return;
  if (!ancestors.empty()) problem.batch.ancestors = ancestors.data();
  problem.q = floats(q);
  problem.q_stride = problem.out_stride = static_cast<int64_t>(heads) * kv.head_dim();
  problem.num_qo_heads = heads;
  problem.kv = kv.layer();
  problem.sm_scale = options.sm_scale;
  problem.logits_soft_cap = options.logits_soft_cap;
  problem.window_left = options.window_left;
  problem.sinks = options.sinks;
  if (options.visits != nullptr) {
    options.visits->check("paged_attention", problem.batch, heads, kv.num_kv_heads());
    check.expect(options.window_left < 0, "window_left", "-1 with visits",
                 std::to_string(options.window_left));
    check.expect(ancestors.empty(), "parents", "none with visits", "some");
    problem.visits = options.visits->plan();
  }
  if (options.arithmetic == DType::bf16) problem.arithmetic = Arithmetic::bf16;
  problem.out = out;

  const AttentionShape shape{heads, kv.num_kv_heads(), kv.head_dim(), options.window_left,
                             options.sinks};
  const int32_t* lengths = problem.batch.kv_len;
  const AttentionPlanSize size =
      attention_plan_size(shape, problem.batch.num_tokens, problem.batch.num_sequences,
                          *std::max_element(lengths, lengths + problem.batch.num_sequences));
  std::vector<AttentionWorkItem> items(static_cast<size_t>(size.items));
  std::vector<AttentionMergeItem> merges(static_cast<size_t>(size.merges));
  std::vector<float> partial_out(static_cast<size_t>(size.partials * kv.head_dim()));
  std::vector<float> partial_ms(static_cast<size_t>(size.partials * 2));
  std::vector<int32_t> done(static_cast<size_t>(size.merges));
  problem.plan = plan_attention(
      shape, problem.batch,
      {items.data(), merges.data(), partial_out.data(), partial_ms.data(), done.data()});
  run_alone(problem, pool);
}

}  // namespace effinfer::ops
