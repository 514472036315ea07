#include "kernels/attention_scores.h"

#include <algorithm>

namespace effinfer::kernels {

std::string describe(const AttentionScoresProblem& p) {
  return "[attention_scores] heads=" + std::to_string(p.num_qo_heads) +
         " kv_heads=" + std::to_string(p.num_kv_heads) + " head_dim=" + std::to_string(p.k.dims) +
         " dtype=" + std::string(name(p.q.dtype)) + " kv_dtype=" + std::string(name(p.k.dtype));
}

// An item reads its keys and all rows of its sequence.
Cost cost(const AttentionScoresProblem& p) {
  Cost cost;
  const int64_t group = p.num_qo_heads / p.num_kv_heads;
  for (int64_t i = 0; i < p.num_items; ++i) {
    const ScoreItem& item = p.items[i];
    const int64_t end = std::min(item.end_unit * kUnitTokens, p.kv_len[item.sequence]);
    const int64_t keys = end - item.first_unit * kUnitTokens;
    const int64_t rows = (p.qo_indptr[item.sequence + 1] - p.qo_indptr[item.sequence]) * group;
    cost.bytes +=
        (keys * dtype_info(p.k.dtype).block_bytes + rows * dtype_info(p.q.dtype).block_bytes) *
        p.k.dims;
    cost.ops += 2 * rows * keys * p.k.dims;
  }
  return cost;
}

}  // namespace effinfer::kernels
