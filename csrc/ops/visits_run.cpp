#include <algorithm>
#include <bit>
#include <cmath>

#include "effinfer/ops/visits.h"
#include "ops/attention.h"
#include "ops/paged_batch.h"
#include "ops/prefill_index.h"
#include "ops/registry.h"

namespace effinfer::ops {

struct Visits::Impl {
  std::vector<int32_t> qo_indptr;
  std::vector<int32_t> kv_len;
  VisitBuffers buffers;
  VisitPlan plan;
};

Visits::Visits(const PagedBatch& batch, int32_t num_qo_heads, int32_t num_kv_heads) {
  const Validator check("visits");
  const BatchLayout layout = check_sequences(check, batch);
  check.expect(num_kv_heads > 0, "num_kv_heads", "a positive number", std::to_string(num_kv_heads));
  check.expect(num_qo_heads > 0 && num_qo_heads % num_kv_heads == 0, "num_qo_heads",
               "a multiple of " + std::to_string(num_kv_heads), std::to_string(num_qo_heads));
  const int64_t sequences = layout.num_sequences;
  impl_ = std::make_unique<Impl>();
  impl_->qo_indptr.assign(layout.qo_indptr, layout.qo_indptr + sequences + 1);
  impl_->kv_len.assign(layout.kv_len, layout.kv_len + sequences);
  const int32_t longest =
      sequences == 0 ? 0 : *std::max_element(impl_->kv_len.begin(), impl_->kv_len.end());
  impl_->buffers =
      VisitBuffers({num_qo_heads, num_kv_heads, visit_block_rows(num_qo_heads, num_kv_heads)},
                   layout.num_tokens, sequences, longest);
  impl_->plan = impl_->buffers.plan(layout);
}
Visits::~Visits() = default;
Visits::Visits(Visits&&) noexcept = default;
Visits& Visits::operator=(Visits&&) noexcept = default;

std::vector<int32_t> Visits::blocks() const {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < num_blocks(); ++i) {
    const VisitBlock& block = impl_->plan.blocks[i];
    out.insert(out.end(), {block.sequence, block.first_row, block.num_rows, block.position});
  }
  return out;
}
int64_t Visits::num_blocks() const {
  return impl_->plan.num_blocks;
}
int32_t Visits::num_kv_heads() const {
  return impl_->plan.num_kv_heads;
}
int64_t Visits::list_words() const {
  return impl_->plan.list_words;
}
uint64_t* Visits::words() {
  return impl_->plan.words;
}

const VisitPlan& plan_of(const Visits& visits, std::string_view op, const BatchLayout& batch,
                         int32_t num_qo_heads, int32_t num_kv_heads) {
  const Visits::Impl& of = visits.impl();
  const bool same = batch.num_sequences == static_cast<int64_t>(of.kv_len.size()) &&
                    std::equal(of.kv_len.begin(), of.kv_len.end(), batch.kv_len) &&
                    std::equal(of.qo_indptr.begin(), of.qo_indptr.end(), batch.qo_indptr) &&
                    of.plan.num_qo_heads == num_qo_heads && of.plan.num_kv_heads == num_kv_heads;
  Validator(op).expect(same, "visits", "lists of this batch and these heads", "those of another");
  return of.plan;
}

namespace {

void check_top(const Validator& check, std::string_view argument, const TopScores& top) {
  check.expect(top.count >= 0, argument, "0 or more", std::to_string(top.count));
  check.expect(std::isfinite(top.mass) && top.mass >= 0.0f && top.mass <= 1.0f, argument,
               "a share of at most 1", std::to_string(top.mass));
}

// With all KV heads' lists chosen by `heads`.
PrefillIndexInputs check_inputs(const Validator& check, const Visits& visits, const TensorView& q,
                                const PagedKv& kv, const PagedBatch& batch,
                                const VisitOptions& options, std::vector<IndexedHead>& heads) {
  const int32_t num_qo_heads = check_queries(check, q, kv);
  PrefillIndexInputs in;
  in.batch = check_batch(check, batch, q.dims[0], kv);
  check.expect(std::isfinite(options.sm_scale), "scale", "a finite number",
               std::to_string(options.sm_scale));
  for (const auto& [name, value] :
       {std::pair("sinks", options.sinks), std::pair("window", options.window),
        std::pair("min_tokens", options.min_tokens)}) {
    check.expect(value >= 0, name, "0 or more", std::to_string(value));
  }
  heads.assign(static_cast<size_t>(kv.num_kv_heads()), IndexedHead::chosen);
  in.q = static_cast<const float*>(q.data);
  in.q_stride = int64_t{num_qo_heads} * kv.head_dim();
  in.num_qo_heads = num_qo_heads;
  in.kv = layer_of(kv);
  in.visits = plan_of(visits, check.op(), in.batch, num_qo_heads, kv.num_kv_heads());
  in.sm_scale = options.sm_scale;
  in.sinks = options.sinks;
  in.window = options.window;
  in.min_tokens = options.min_tokens;
  in.heads = heads.data();
  in.max_kv_len = static_cast<int32_t>(visits.list_words() * kPageSize);
  return in;
}

}  // namespace

void column_visits(Visits& visits, const TensorView& q, const PagedKv& kv, const PagedBatch& batch,
                   const ColumnVisits& columns, const VisitOptions& options, ThreadPool& pool) {
  const Validator check("column_visits");
  std::vector<IndexedHead> heads;
  ColumnIndexProblem problem;
  problem.in = check_inputs(check, visits, q, kv, batch, options, heads);
  check.expect(columns.last_rows > 0, "last_rows", "a positive number",
               std::to_string(columns.last_rows));
  check.expect(columns.row_stride >= 0, "row_stride", "0 or more",
               std::to_string(columns.row_stride));
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
  problem.stride = stride;
  problem.pages = blocks.pages;
  run_alone(problem, pool);
}

}  // namespace effinfer::ops
