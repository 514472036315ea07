#include "ops/attention_mass.h"

#include "effinfer/dtype.h"

namespace effinfer::ops {

std::string describe(const AttentionMassProblem& problem) {
  return "[attention_mass] plane=" + std::string(problem.name) +
         " heads=" + std::to_string(problem.num_qo_heads) +
         " kv_heads=" + std::to_string(problem.kv.num_kv_heads) +
         " head_dim=" + std::to_string(problem.kv.head_dim) +
         " kv_dtype=" + std::string(name(problem.kv.dtype));
}

// Maxima and sums first, then probabilities.
Cost cost(const AttentionMassProblem& p) {
  const int64_t key_bytes =
      int64_t{p.kv.num_kv_heads} * p.kv.head_dim * dtype_info(p.kv.dtype).block_bytes;
  Cost cost;
  for (int64_t i = 0; i < p.num_scored; ++i) {
    const ScoredRows& scored = p.scored[i];
    if (scored.name != p.name) continue;
    const int64_t keys = p.batch.kv_len[scored.sequence];
    cost.bytes += 2 * keys * key_bytes;
    cost.ops += 4 * keys * scored.rows * p.num_qo_heads * p.kv.head_dim;
  }
  return cost;
}

}  // namespace effinfer::ops
