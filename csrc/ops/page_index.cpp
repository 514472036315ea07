#include "ops/page_index.h"

#include <cmath>
#include <vector>

#include "effinfer/dtype.h"
#include "effinfer/ops/visits.h"
#include "ops/paged_batch.h"
#include "ops/registry.h"

namespace effinfer::ops {

std::string describe(const PageIndexProblem& p) {
  std::string text = "[page_index] pages=" + std::to_string(p.pages);
  if (p.share > 0.0f) text += " share=" + std::to_string(p.share);
  return text + " heads=" + std::to_string(p.num_qo_heads) +
         " kv_heads=" + std::to_string(p.kv.num_kv_heads) +
         " head_dim=" + std::to_string(p.kv.head_dim) +
         " kv_dtype=" + std::string(name(p.kv.dtype)) +
         " sink_tokens=" + std::to_string(p.sink_tokens) +
         " local_tokens=" + std::to_string(p.local_tokens) + "; all keys: rows of prompts, or of " +
         "fewer than " + std::to_string(p.min_tokens) + " keys";
}

// As if all bounds were known.
Cost cost(const PageIndexProblem& p) {
  Cost cost;
  for (int64_t i = 0; i < p.visits.num_rows; ++i) {
    const VisitBlock& row = p.visits.blocks[p.visits.num_blocks + i];
    if (visits_all(p, row)) continue;
    const int64_t bounds = candidates_of(p, row).count() * 2 * p.kv.head_dim;
    cost.bytes += bounds * p.kv.num_kv_heads * static_cast<int64_t>(sizeof(uint16_t));
    cost.ops += 2 * bounds * p.num_qo_heads;
  }
  return cost;
}

void page_visits(Visits& visits, const TensorView& q, const PagedKv& kv, const PagedBatch& batch,
                 const PageVisits& pages, const VisitOptions& options, ThreadPool& pool) {
  const Validator check("page_visits");
  PageIndexProblem p;
  p.num_qo_heads = check_queries(check, q, kv);
  p.batch = check_batch(check, batch, q.dims[0], kv);
  check.finite("sm_scale", options.sm_scale);
  check.at_least("sink_tokens", options.sink_tokens, 0);
  check.at_least("local_tokens", options.local_tokens, 0);
  check.at_least("min_tokens", options.min_tokens, 0);
  check.at_least("pages", pages.pages, 0);
  check.expect(pages.share >= 0.0f && pages.share <= 1.0f, "share", "a share of at most 1",
               std::to_string(pages.share));
  check.expect(options.arithmetic == DType::f32, "arithmetic", "f32",
               std::string(name(options.arithmetic)));
  const std::vector<IndexedHead> heads(static_cast<size_t>(kv.num_kv_heads()), IndexedHead::chosen);
  p.q = static_cast<const float*>(q.data);
  p.q_stride = int64_t{p.num_qo_heads} * kv.head_dim();
  p.kv = layer_of(kv);
  p.visits = plan_of(visits, check.op(), p.batch, p.num_qo_heads, kv.num_kv_heads());
  p.sm_scale = options.sm_scale;
  p.sink_tokens = options.sink_tokens;
  p.local_tokens = options.local_tokens;
  p.min_tokens = options.min_tokens;
  p.pages = pages.pages;
  p.share = pages.share;
  p.heads = heads.data();
  p.max_kv_len = static_cast<int32_t>(visits.list_words() * kPageSize);
  run_alone(p, pool);
}

}  // namespace effinfer::ops
