#include "ops/attention_scores.h"

#include <algorithm>

namespace effinfer::ops {

std::string describe(const AttentionScoresProblem& p) {
  return "[attention_scores] heads=" + std::to_string(p.num_qo_heads) +
         " kv_heads=" + std::to_string(p.num_kv_heads) + " head_dim=" + std::to_string(p.k.dims) +
         " dtype=" + std::string(name(p.q.dtype)) + " kv_dtype=" + std::string(name(p.k.dtype));
}

}  // namespace effinfer::ops
