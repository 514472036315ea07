// Lists chosen by scores of blocks: queries and keys are pooled to fewer, wider rows, and attention
// scores of these are summed up by block.
#include <memory>
#include <string>

#include "effinfer/ops/attention_scores.h"
#include "ops/attention_plan.h"
#include "ops/attention_tensors.h"
#include "ops/index_builder.h"
#include "ops/pooled_rows.h"
#include "ops/registry.h"
#include "ops/score_passes.h"
#include "ops/scores_there.h"
#include "ops/workplace.h"

namespace effinfer::ops {
namespace {

// Float32 rows [groups, heads, dims or stride * dims], a sequence's groups of `size` positions one
// after the other.
struct PooledRows {
  std::vector<int32_t> indptr = {0};  // [S + 1]
  std::vector<int32_t> first;         // [S] positions / size of the first group
  std::shared_ptr<void> data;         // where the scores are made
  int64_t width = 0;
};

// Pools positions [begin(s), kv_len[s]) of every sequence; address(s, position) is a token's row.
// `p` lacks the tokens.
template <class Begin, class Address>
PooledRows pool_rows(PoolRowsProblem p, const std::vector<int32_t>& kv_len,
                     const Executor& executor, Begin&& begin, Address&& address) {
  PooledRows out;
  std::vector<const uint8_t*> tokens;
  for (size_t s = 0; s < kv_len.size(); ++s) {
    const auto sequence = static_cast<int32_t>(s);
    const int64_t first = begin(sequence);
    out.first.push_back(static_cast<int32_t>(first / p.group_size));
    for (int64_t group = out.first.back(); group * p.group_size < kv_len[s]; ++group) {
      for (int64_t at = group * p.group_size; at < (group + 1) * p.group_size; ++at) {
        const bool given = at >= first && at < kv_len[s];
        tokens.push_back(given ? address(sequence, at) : nullptr);
      }
      ++p.num_groups;
    }
    out.indptr.push_back(static_cast<int32_t>(p.num_groups));
  }
  out.width = p.width();
  Workplace place(executor);
  out.data =
      place.allocate(static_cast<size_t>(p.num_groups * p.heads * out.width) * sizeof(float));
  p.tokens = place.place(tokens);
  p.out = static_cast<float*>(out.data.get());
  run_alone(p, executor);
  return out;
}

// Scores of blocks [num_qo_heads][blocks of rows][blocks of keys], one sequence after the other.
struct BlockScores {
  std::vector<ScoreRows> rows;
  std::vector<float> values;
};

struct BlockScorer {
  AttentionPlan::Impl plan;
  int32_t block_size = 0;
  QueryRows q;
  KvRows k;
  bool concatenates = false;
  int64_t size = 1;
  float sm_scale = 1.0f;

  BlockScores run(const Executor& executor) const;

  // Of the first row of a sequence.
  int64_t position(int32_t s) const {
    const auto i = static_cast<size_t>(s);
    return int64_t{plan.kv_len[i]} - (plan.qo_indptr[i + 1] - plan.qo_indptr[i]);
  }

  PoolRowsProblem pooling(DType dtype, int64_t heads, int64_t dims, int64_t head_stride) const {
    PoolRowsProblem p;
    p.group_size = size;
    p.dtype = dtype;
    p.heads = heads;
    p.dims = dims;
    p.head_stride = head_stride;
    p.concatenates = concatenates;
    return p;
  }

  PooledRows pool_queries(const Executor& executor) const {
    const int64_t bytes = dtype_info(q.dtype).block_bytes;
    PoolRowsProblem p = pooling(q.dtype, plan.geometry.num_qo_heads, q.dims, q.head_stride * bytes);
    p.reverses = true;
    return pool_rows(
        p, plan.kv_len, executor, [&](int32_t s) { return position(s); },
        [&](int32_t s, int64_t at) {
          const int64_t row = plan.qo_indptr[static_cast<size_t>(s)] + at - position(s);
          return q.data + row * q.row_stride * bytes;
        });
  }

  PooledRows pool_keys(const Executor& executor) const {
    const PoolRowsProblem p = pooling(k.dtype, plan.geometry.num_kv_heads, k.dims, k.head_stride);
    return pool_rows(
        p, plan.kv_len, executor, [](int32_t) { return int64_t{0}; },
        [&](int32_t s, int64_t at) {
          const int64_t first = plan.kv_indptr[static_cast<size_t>(s)];
          if (!plan.paged) return k.data + (first + at) * k.token_stride;
          const int64_t tokens = plan.geometry.page_size;
          const int32_t page = plan.kv_indices[static_cast<size_t>(first + at / tokens)];
          return k.data + page * k.page_stride + at % tokens * k.token_stride;
        });
  }
};

BlockScorer make_scorer(const Validator& check, const AttentionGeometry& geometry,
                        const AttentionSequences& sequences, const BlockScoreInputs& inputs,
                        int32_t block_size) {
  BlockScorer scorer{AttentionPlan::Impl(geometry, sequences), block_size, {}, {}};
  const AttentionTensors tensors(check, scorer.plan, inputs.order);
  scorer.q = tensors.query_rows("q", inputs.q, geometry.head_dim_qk);
  scorer.k = tensors.kv_rows("k", inputs.k, geometry.head_dim_qk);
  check.row_type("k", scorer.k.dtype);
  scorer.concatenates = inputs.method == BlockMethod::antidiagonal;
  if (scorer.concatenates) {
    const int32_t stride = inputs.stride;
    const bool divides = stride > 0 && block_size % stride == 0;
    check.expect(divides, "stride", "a divisor of block_size " + std::to_string(block_size),
                 std::to_string(stride));
    const int32_t groups = block_size / stride;
    check.expect((groups & (groups - 1)) == 0 && groups <= 256, "stride",
                 "block_size / stride to be a power of two up to 256", std::to_string(groups));
  }
  scorer.size = scorer.concatenates ? inputs.stride : block_size;
  scorer.sm_scale =
      scorer.concatenates ? inputs.sm_scale / static_cast<float>(inputs.stride) : inputs.sm_scale;
  return scorer;
}

BlockScores BlockScorer::run(const Executor& executor) const {
  const PooledRows queries = pool_queries(executor);
  const PooledRows keys = pool_keys(executor);
  std::vector<int32_t> kv_len;
  BlockScores out;
  int64_t first = 0;
  const int32_t per_block = block_size / size;
  for (size_t s = 0; s < plan.kv_len.size(); ++s) {
    kv_len.push_back(keys.indptr[s + 1] - keys.indptr[s]);
    const int64_t columns = (kv_len.back() + per_block - 1) / per_block;
    const int64_t begin = queries.first[s] / per_block;
    const int64_t rows = queries.indptr[s] == queries.indptr[s + 1] ? 0 : columns - begin;
    out.rows.push_back({first, rows * columns, columns});
    first += rows * columns * plan.geometry.num_qo_heads;
  }
  AttentionScoresProblem p;
  p.source = KeySource::rows;
  p.num_qo_heads = plan.geometry.num_qo_heads;
  p.num_kv_heads = plan.geometry.num_kv_heads;
  p.q = {static_cast<const uint8_t*>(queries.data.get()), DType::f32,
         static_cast<int32_t>(queries.width), p.num_qo_heads * queries.width, queries.width};
  p.k.data = static_cast<const uint8_t*>(keys.data.get());
  p.k.dims = static_cast<int32_t>(keys.width);
  p.k.token_stride = p.num_kv_heads * keys.width * 4;
  p.k.head_stride = keys.width * 4;
  p.batch.num_sequences = static_cast<int64_t>(kv_len.size());
  p.batch.num_tokens = queries.indptr.back();
  p.batch.qo_indptr = queries.indptr.data();
  p.batch.kv_indptr = keys.indptr.data();
  p.batch.kv_len = kv_len.data();
  p.causal = plan.geometry.causal;
  p.sm_scale = sm_scale;
  p.row_block = per_block;
  p.key_block = per_block;
  const Workplace place(executor);
  const auto count = static_cast<size_t>(first);
  const std::shared_ptr<void> sums = place.allocate(count * sizeof(float));
  place.zero(sums.get(), count * sizeof(float));
  p.out = static_cast<float*>(sums.get());
  if (Queue* const queue = executor.queue()) {
    score_there(p, 0, out.rows, *queue);
  } else {
    p.rows = out.rows.data();
    run_score_passes(p, nullptr, *executor.pool());
  }
  out.values = place.values<float>(sums.get(), count);
  return out;
}

}  // namespace

BlockLists block_score_lists(const IndexRows& rows, const AttentionGeometry& geometry,
                             const AttentionSequences& sequences, const BlockScoreInputs& inputs,
                             const Executor& executor, ThreadPool& pool) {
  const Validator lists(rows.op);
  const IndexBuilder builder(lists, rows);
  check_top(lists, "num_blocks", inputs.top);
  const Validator check(rows.op, executor.device());
  const BlockScores scores =
      make_scorer(check, geometry, sequences, inputs, rows.block_size).run(executor);
  BlockListsProblem problem;
  problem.scores = scores.values.data();
  problem.rows = scores.rows.data();
  problem.group = geometry.num_qo_heads / geometry.num_kv_heads;
  problem.top = inputs.top;
  return builder.build(problem, pool);
}

}  // namespace effinfer::ops
