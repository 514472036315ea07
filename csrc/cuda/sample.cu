#include "cuda/bodies/chain_speculation.h"
#include "cuda/bodies/row_extents.h"
#include "cuda/bodies/row_ranges.h"
#include "cuda/bodies/sample_rows.h"
#include "cuda/bodies/token_bitmask.h"
#include "cuda/bodies/weigh_parts.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

const char* rejects_sampling(const ops::RowSamplingProblem& p) {
  if (p.result == ops::RowResult::top) return "the result is top-k: see row_top";
  if (p.dtype != DType::f32 || p.out_dtype != DType::f32) return "rows are not float32";
  if (p.vocab > 1 << 24) return "vocab is above 2^24";
  return ops::rejects(p);
}

// Whether no row has a filter but min-p, as far as the host sees.
bool has_no_filters(const ops::RowSamplingProblem& p) {
  const bool has_top_k = p.top_k.values != nullptr || p.narrow_top_k != nullptr ||
                         (p.top_k.value > 0 && p.top_k.value < p.vocab);
  return !has_top_k && p.top_p.values == nullptr && p.top_p.value >= 1.0f;
}

// Several blocks a row, but for its end.
void weigh_split_rows(const ops::RowSamplingProblem& p, const ops::SamplingScratch& scratch,
                      Queue& queue) {
  const SplitParams params{p, scratch, vectored(p.x, p.vocab, sizeof(float))};
  const int64_t blocks = p.rows * scratch.parts;
  launch<RowExtents>(params, blocks, queue);
  if (!has_no_filters(p)) launch<RowRanges>(params, blocks, queue);
  launch<WeighParts>(params, blocks, queue);
}

void sample_rows(const ops::RowSamplingProblem& p, Queue& queue) {
  SampleParams params{};
  params.problem = p;
  params.vectored = vectored(p.x, p.vocab, sizeof(float));
  params.out_vectored = vectored(p.out, p.vocab, sizeof(float));
  if (p.result == ops::RowResult::sample && p.scratch != nullptr) {
    params.split = ops::SamplingScratch::of(p.vocab);
    if (params.split.parts > 0) weigh_split_rows(p, params.split, queue);
  }
  launch<SampleRows>(params, p.rows, queue);
}

void chain_speculation(const ops::ChainSpeculationProblem& p, Queue& queue) {
  const bool aligned = vectored(p.target_probs, p.vocab, sizeof(float)) &&
                       vectored(p.draft_probs, p.vocab, sizeof(float));
  launch<ChainSpeculation>({p, aligned}, p.rows, queue);
}

void token_bitmask(const ops::TokenBitmaskProblem& p, Queue& queue) {
  const int64_t parts = blocks_for(p.vocab, TokenBitmask::kLogits);
  launch<TokenBitmask>({p, parts}, p.rows * parts, queue);
}

}  // namespace

void register_sample() {
  add<ops::RowSamplingProblem>("row_sampling", rejects_sampling, sample_rows);
  add<ops::ChainSpeculationProblem>("chain_speculation", takes_all, chain_speculation);
  add<ops::TokenBitmaskProblem>("token_bitmask", ops::rejects, token_bitmask);
}

}  // namespace effinfer::cuda
