#include <algorithm>
#include <cmath>
#include <vector>

#include "effinfer/ops/attention.h"
#include "ops/attention_tensors.h"
#include "ops/paged_batch.h"
#include "ops/registry.h"

namespace effinfer::ops {
namespace {

const int32_t* ints(const TensorView& view) {
  return static_cast<const int32_t*>(view.data);
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
      check.expect(parent >= -1 && parent < i, indexed("parents", first + i),
                   "-1 to " + std::to_string(i - 1), std::to_string(parent));
      const uint64_t above = parent < 0 ? 0 : ancestors[static_cast<size_t>(first + parent)];
      ancestors[static_cast<size_t>(first + i)] = above | uint64_t{1} << i;
    }
  }
  return ancestors;
}

void set_chunks(const Validator& check, const PagedAttentionOptions& options, const TensorView& q,
                AttentionProblem& problem) {
  check.at_least("chunk", options.chunk, 0);
  problem.chunk = options.chunk;
  if (options.chunk == 0) {
    check.expect(options.q_before.data == nullptr && options.q_far.data == nullptr, "chunk",
                 "a positive number with q_before or q_far", "0");
    return;
  }
  check.expect(options.chunk % kChunkTokens == 0, "chunk",
               "a multiple of " + std::to_string(kChunkTokens), std::to_string(options.chunk));
  check.expect(options.window_left < 0, "window_left", "-1 with chunk",
               std::to_string(options.window_left));
  const auto rows = [&](std::string_view argument, const TensorView& given) {
    check.expect(given.data != nullptr, argument, "an array with chunk", "none");
    check.dtype(argument, given, DType::f32);
    check.shape(argument, given, q.dims);
    QueryRows made = problem.q;
    made.data = static_cast<const uint8_t*>(given.data);
    return made;
  };
  problem.q_before = rows("q_before", options.q_before);
  problem.q_far = rows("q_far", options.q_far);
}

}  // namespace

void paged_attention(const TensorView& q, const PagedKv& kv, const PagedBatch& batch,
                     const PagedAttentionOptions& options, float* out, ThreadPool& pool) {
  const Validator check("paged_attention");
  const int32_t heads = check_queries(check, q, kv);
  check_logits(check, options.sm_scale, options.logits_soft_cap);
  check.at_least("window_left", options.window_left, -1);
  check.at_least("sink_tokens", options.sink_tokens, 0);
  check.expect(options.arithmetic == DType::f32 || options.arithmetic == DType::bf16, "arithmetic",
               "f32 or bf16", std::string(name(options.arithmetic)));
  AttentionProblem problem;
  problem.batch = check_batch(check, batch, q.dims[0], kv);
  const std::vector<uint64_t> ancestors = ancestors_of(check, options.parents, problem.batch);
  if (problem.batch.num_tokens == 0) return;
  if (!ancestors.empty()) problem.batch.ancestors = ancestors.data();
  problem.q = {static_cast<const uint8_t*>(q.data), DType::f32, kv.head_dim(),
               int64_t{heads} * kv.head_dim(), kv.head_dim()};
  set_chunks(check, options, q, problem);
  problem.num_qo_heads = heads;
  problem.num_kv_heads = kv.num_kv_heads();
  problem.k = keys_of(layer_of(kv));
  problem.v = values_of(layer_of(kv));
  problem.sm_scale = options.sm_scale;
  problem.logits_soft_cap = options.logits_soft_cap;
  problem.window_left = options.window_left;
  problem.sink_tokens = options.sink_tokens;
  problem.alibi_slopes = per_head(check, "alibi_slopes", options.alibi_slopes, heads);
  problem.sink_logits = per_head(check, "sink_logits", options.sink_logits, heads);
  if (options.visits != nullptr) {
    problem.visits =
        plan_of(*options.visits, "paged_attention", problem.batch, heads, kv.num_kv_heads());
    check.expect(ancestors.empty(), "parents", "none with visits", "some");
  }
  if (options.arithmetic == DType::bf16) problem.arithmetic = Arithmetic::bf16;
  problem.out = reinterpret_cast<uint8_t*>(out);
  problem.out_stride = problem.q.row_stride;
  problem.lse = options.lse;
  problem.lse_factor = options.lse_factor;
  plan_and_run(problem, pool);
}

}  // namespace effinfer::ops
