#include "ops/prefill_index.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <vector>

#include "effinfer/dtype.h"
#include "ops/index_builder.h"
#include "ops/paged_batch.h"
#include "ops/registry.h"

namespace effinfer::ops {
namespace {

std::string describe_cost(float product_cost) {
  if (product_cost == 0.0f) return "";
  std::array<char, 100> text;
  std::snprintf(
      text.data(), text.size(),
      ", or choosing, at %.1f products of attention each, costs over %.2f of what it can save",
      static_cast<double>(product_cost), static_cast<double>(kChoosingShare));
  return text.data();
}

std::string describe(const PrefillIndexInputs& in) {
  return " heads=" + std::to_string(in.num_qo_heads) +
         " kv_heads=" + std::to_string(in.kv.num_kv_heads) +
         " head_dim=" + std::to_string(in.kv.head_dim) +
         " kv_dtype=" + std::string(name(in.kv.dtype)) +
         " sink_tokens=" + std::to_string(in.sink_tokens) +
         " local_tokens=" + std::to_string(in.local_tokens) + "; all keys: fewer than " +
         std::to_string(kSparseRows) + " rows or " + std::to_string(in.min_tokens) + " keys" +
         describe_cost(in.product_cost);
}

std::string describe(const TopScores& top) {
  return top.mass > 0.0f ? "mass " + std::to_string(top.mass) : std::to_string(top.count);
}

int64_t key_bytes(const PrefillIndexInputs& in) {
  return int64_t{in.kv.num_kv_heads} * in.kv.head_dim * dtype_info(in.kv.dtype).block_bytes;
}

template <class Problem>
Cost cost_of(const Problem& problem) {
  const PrefillIndexInputs& in = problem.in;
  Cost cost;
  for (int64_t i = 0; i < in.visits.num_sequences; ++i) {
    const int64_t sequence = in.visits.sequences[i].sequence;
    if (!chooses(problem, sequence)) continue;
    cost.bytes += in.batch.kv_len[sequence] * key_bytes(in);
    cost.ops += 2 * products(problem, sequence) * in.num_qo_heads * in.kv.head_dim;
  }
  return cost;
}

}  // namespace

std::string describe(const ColumnIndexProblem& problem) {
  return "[column_index] " +
         (problem.row_stride > 0 ? "every " + std::to_string(problem.row_stride) + ". row"
                                 : "last " + std::to_string(problem.last_rows) + " rows") +
         " columns=" + describe(problem.columns) + " slashes=" + describe(problem.slashes) +
         describe(problem.in);
}

std::string describe(const BlockIndexProblem& problem) {
  return "[block_index] " +
         (problem.stride > 0 ? "antidiagonals of " + std::to_string(problem.stride)
                             : std::string(problem.probe ? "probe queries" : "means")) +
         (problem.has_budget() ? " keys=" + std::to_string(problem.keys) +
                                     " share=" + std::to_string(problem.share) + " of a KV head"
                               : " pages=" + describe(problem.pages)) +
         describe(problem.in);
}

Cost cost(const ColumnIndexProblem& problem) {
  return cost_of(problem);
}
Cost cost(const BlockIndexProblem& problem) {
  return cost_of(problem);
}

namespace {

// With all KV heads' lists chosen by `heads`.
PrefillIndexInputs check_inputs(const Validator& check, const Visits& visits, const TensorView& q,
                                const PagedKv& kv, const PagedBatch& batch,
                                const VisitOptions& options, std::vector<IndexedHead>& heads) {
  const int32_t num_qo_heads = check_queries(check, q, kv);
  PrefillIndexInputs in;
  in.batch = check_batch(check, batch, q.dims[0], kv);
  check.finite("sm_scale", options.sm_scale);
  check_counts(check, options);
  check.expect(options.arithmetic == DType::f32 || options.arithmetic == DType::bf16, "arithmetic",
               "f32 or bf16", std::string(name(options.arithmetic)));
  heads.assign(static_cast<size_t>(kv.num_kv_heads()), IndexedHead::chosen);
  in.q = static_cast<const float*>(q.data);
  in.q_stride = int64_t{num_qo_heads} * kv.head_dim();
  in.num_qo_heads = num_qo_heads;
  in.kv = layer_of(kv);
  in.visits = plan_of(visits, check.op(), in.batch, num_qo_heads, kv.num_kv_heads());
  in.sm_scale = options.sm_scale;
  in.sink_tokens = options.sink_tokens;
  in.local_tokens = options.local_tokens;
  in.min_tokens = options.min_tokens;
  if (options.arithmetic == DType::bf16) in.arithmetic = Arithmetic::bf16;
  in.heads = heads.data();
  in.max_kv_len = static_cast<int32_t>(visits.list_words() * kPageSize);
  return in;
}

void check_budget(const Validator& check, const BlockVisits& blocks) {
  check.at_least("keys", blocks.keys, 0);
  check.expect(blocks.share >= 0.0f && blocks.share <= 1.0f, "share", "0 to 1",
               std::to_string(blocks.share));
  const bool both = (blocks.keys > 0 || blocks.share > 0.0f) && chooses_any(blocks.pages);
  check.expect(!both, "keys", "0, and share, with pages or mass", std::to_string(blocks.keys));
}

}  // namespace

void column_visits(Visits& visits, const TensorView& q, const PagedKv& kv, const PagedBatch& batch,
                   const ColumnVisits& columns, const VisitOptions& options, ThreadPool& pool) {
  const Validator check("column_visits");
  std::vector<IndexedHead> heads;
  ColumnIndexProblem problem;
  problem.in = check_inputs(check, visits, q, kv, batch, options, heads);
  check.positive("last_rows", columns.last_rows);
  check.at_least("row_stride", columns.row_stride, 0);
  check_top(check, "columns", columns.columns);
  check_top(check, "slashes", columns.slashes);
  problem.last_rows = columns.last_rows;
  problem.row_stride = columns.row_stride;
  problem.columns = columns.columns;
  problem.slashes = columns.slashes;
  run_alone(problem, pool);
}

void block_visits(Visits& visits, const TensorView& q, const PagedKv& kv, const PagedBatch& batch,
                  const BlockVisits& blocks, const VisitOptions& options, ThreadPool& pool) {
  const Validator check("block_visits");
  std::vector<IndexedHead> heads;
  BlockIndexProblem problem;
  problem.in = check_inputs(check, visits, q, kv, batch, options, heads);
  const int32_t stride = blocks.stride;
  check.expect(stride == 0 || (stride >= 4 && stride <= 64 &&
                               std::has_single_bit(static_cast<unsigned>(stride))),
               "stride", "0, 4, 8, 16, 32 or 64", std::to_string(stride));
  check_top(check, "pages", blocks.pages);
  check.expect(stride == 0 || !blocks.probe, "stride", "0 with a probe query",
               std::to_string(stride));
  check_budget(check, blocks);
  problem.stride = stride;
  problem.probe = blocks.probe;
  problem.pages = blocks.pages;
  problem.keys = blocks.keys;
  problem.share = blocks.share;
  run_alone(problem, pool);
}

}  // namespace effinfer::ops
