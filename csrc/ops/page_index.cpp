#include "ops/page_index.h"

#include <cmath>
#include <vector>

#include "effinfer/dtype.h"
#include "effinfer/ops/visits.h"
#include "ops/paged_batch.h"
#include "ops/registry.h"

namespace effinfer::ops {
namespace {

// Channels of each head that are multiplied with a key.
int64_t channels_of(const PageIndexProblem& p) {
  return p.num_channels > 0 ? p.num_channels : p.kv.head_dim;
}

std::string describe_scores(const PageIndexProblem& p) {
  if (p.has_windows()) return "[page_index] score=means";
  if (p.means) return "[page_index] score=means unit=" + std::to_string(p.unit);
  if (p.has_bounds()) return "[page_index] unit=" + std::to_string(p.unit);
  if (p.num_channels == 0) return "[key_index]";
  return "[key_index] channels=" + std::to_string(p.num_channels);
}

void check_channels(const Validator& check, const TensorView& channels, const PagedKv& kv) {
  check.dtype("channels", channels, DType::i32);
  check.rank("channels", channels, 2);
  check.positive("channels", channels.dims[1]);
  check.shape("channels", channels, {kv.num_kv_heads(), channels.dims[1]});
  const auto* values = static_cast<const int32_t*>(channels.data);
  for (int64_t i = 0; i < channels.dims.num_elements(); ++i) {
    const bool first = i % channels.dims[1] == 0;
    const int32_t least = first ? 0 : values[i - 1] + 1;
    check.expect(values[i] >= least && values[i] < kv.head_dim(), "channels",
                 "of each KV head increasing ones below head_dim", std::to_string(values[i]));
  }
}

struct Arguments {
  const TensorView& q;
  const PagedKv& kv;
  const PagedBatch& batch;
  const VisitOptions& options;
};

// Of unit 64, all heads.
PageIndexProblem checked(const Validator& check, Visits& visits, const Arguments& arguments,
                         const RowChoice& choice, const std::vector<IndexedHead>& heads) {
  const auto& [q, kv, batch, options] = arguments;
  PageIndexProblem p;
  p.num_qo_heads = check_queries(check, q, kv);
  p.batch = check_batch(check, batch, q.dims[0], kv);
  check.finite("sm_scale", options.sm_scale);
  check_counts(check, options);
  check.at_least("keys", choice.keys, 0);
  check.expect(choice.share >= 0.0f && choice.share <= 1.0f, "share", "a share of at most 1",
               std::to_string(choice.share));
  check.expect(options.arithmetic == DType::f32, "arithmetic", "f32",
               std::string(name(options.arithmetic)));
  p.q = static_cast<const float*>(q.data);
  p.q_stride = int64_t{p.num_qo_heads} * kv.head_dim();
  p.kv = layer_of(kv);
  p.visits = plan_of(visits, check.op(), p.batch, p.num_qo_heads, kv.num_kv_heads());
  p.sm_scale = options.sm_scale;
  p.sink_tokens = options.sink_tokens;
  p.local_tokens = options.local_tokens;
  p.min_tokens = options.min_tokens;
  p.keys = choice.keys;
  p.share = choice.share;
  p.vote = choice.vote;
  check.at_least("window_left", choice.window_left, -1);
  p.window_left = choice.window_left;
  p.heads = heads.data();
  p.max_kv_len = static_cast<int32_t>(visits.list_words() * kPageSize);
  return p;
}

std::vector<IndexedHead> all_heads(const PagedKv& kv) {
  return std::vector<IndexedHead>(static_cast<size_t>(kv.num_kv_heads()), IndexedHead::chosen);
}

}  // namespace

std::string describe(const PageIndexProblem& p) {
  std::string text = describe_scores(p) + " keys=" + std::to_string(p.keys);
  if (p.share > 0.0f) text += " share=" + std::to_string(p.share);
  if (p.vote == HeadVote::sum) text += " vote=sum";
  if (p.reuse > 0.0f) text += " reuse=" + std::to_string(p.reuse);
  return text + " heads=" + std::to_string(p.num_qo_heads) +
         " kv_heads=" + std::to_string(p.kv.num_kv_heads) +
         " head_dim=" + std::to_string(p.kv.head_dim) +
         " kv_dtype=" + std::string(name(p.kv.dtype)) +
         " sink_tokens=" + std::to_string(p.sink_tokens) +
         " local_tokens=" + std::to_string(p.local_tokens) +
         (p.window_left < 0 ? "" : " window_left=" + std::to_string(p.window_left)) +
         "; all keys: rows of prompts, or of " + "fewer than " + std::to_string(p.min_tokens) +
         " keys";
}

// As if all bounds were known.
Cost cost(const PageIndexProblem& p) {
  Cost cost;
  for (int64_t i = 0; i < p.visits.num_rows; ++i) {
    const VisitBlock& row = p.visits.blocks[p.visits.num_blocks + i];
    if (visits_all(p, row)) continue;
    const int64_t units = candidates_of(p, row).count() * (kPageSize / p.summary_unit());
    const int64_t numbers =
        units * (p.has_bounds() ? p.summary_vectors() * p.kv.head_dim : channels_of(p));
    const int64_t bytes = p.has_bounds() ? static_cast<int64_t>(sizeof(uint16_t))
                                         : dtype_info(p.kv.dtype).block_bytes;
    cost.bytes += numbers * bytes * p.kv.num_kv_heads;
    cost.ops += 2 * numbers * p.num_qo_heads;
  }
  return cost;
}

void page_visits(Visits& visits, const TensorView& q, const PagedKv& kv, const PagedBatch& batch,
                 const PageVisits& pages, const VisitOptions& options, ThreadPool& pool) {
  const Validator check("page_visits");
  const std::vector<IndexedHead> heads = all_heads(kv);
  PageIndexProblem p = checked(check, visits, {q, kv, batch, options}, pages.choice, heads);
  check.expect(is_bounds_unit(pages.unit), "unit", "16, 32 or 64", std::to_string(pages.unit));
  check.expect(!pages.means || is_means_unit(pages.unit), "unit", "16 or 64 with means",
               std::to_string(pages.unit));
  p.unit = pages.unit;
  p.means = pages.means;
  run_alone(p, pool);
}

void key_visits(Visits& visits, const TensorView& q, const PagedKv& kv, const PagedBatch& batch,
                const KeyVisits& tokens, const VisitOptions& options, ThreadPool& pool) {
  const Validator check("key_visits");
  const std::vector<IndexedHead> heads = all_heads(kv);
  PageIndexProblem p = checked(check, visits, {q, kv, batch, options}, tokens.choice, heads);
  p.unit = 1;
  if (tokens.channels.dims.rank() > 0) {
    check_channels(check, tokens.channels, kv);
    p.channels = static_cast<const int32_t*>(tokens.channels.data);
    p.num_channels = static_cast<int32_t>(tokens.channels.dims[1]);
  }
  run_alone(p, pool);
}

}  // namespace effinfer::ops
