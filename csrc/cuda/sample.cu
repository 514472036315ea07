#include "cuda/bodies/chain_speculation.h"
#include "cuda/bodies/sample_rows.h"
#include "cuda/bodies/token_bitmask.h"
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

void sample_rows(const ops::RowSamplingProblem& p, Queue& queue) {
  SampleParams params{};
  params.problem = p;
  params.vectored = vectored(p.x, p.vocab, sizeof(float));
  params.out_vectored = vectored(p.out, p.vocab, sizeof(float));
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
