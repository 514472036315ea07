#include "ops/attention.h"

#include <algorithm>
#include <limits>

namespace effinfer::ops {
namespace {

// The keys that all rows of a sequence see together: row i of n sees the last of
// kv_len - n + i + 1 keys, at most `most` of them.
int64_t visible_keys(int64_t rows, int64_t kv_len, int64_t most) {
  const int64_t first = kv_len - rows + 1;
  const int64_t growing = std::clamp<int64_t>(most - first + 1, 0, rows);
  return growing * first + growing * (growing - 1) / 2 + (rows - growing) * most;
}

}  // namespace

std::string describe(const AttentionProblem& p) {
  std::string text = "[attention] heads=" + std::to_string(p.num_qo_heads) +
                     " kv_heads=" + std::to_string(p.num_kv_heads) + " head_dim=";
  const int32_t dim_qk = p.k.dims + p.k_rope.dims;
  if (dim_qk != p.v.dims) text += std::to_string(dim_qk) + "/";
  text += std::to_string(p.v.dims) + " kv_dtype=" + std::string(name(p.k.dtype));
  if (p.source == KeySource::rows) text += " rows dtype=" + std::string(name(p.q.dtype));
  text += " window_left=" + std::to_string(p.window_left) +
          " logits_soft_cap=" + std::to_string(p.logits_soft_cap);
  if (p.arithmetic != Arithmetic::f32) text += " arithmetic=" + std::string(name(p.arithmetic));
  if (p.visits.list_words > 0) text += " visits";
  if (p.weighs_keys()) text += " weights";
  if (p.out_operand.cols > 0) text += " out=" + std::string(name(p.out_operand.arithmetic));
  return text;
}

// A sequence's keys are read once, whatever the number of its rows and of tiles. With lists of
// visits, whose sizes only the step knows: as if all keys were visited.
Cost cost(const AttentionProblem& p) {
  const BatchLayout& batch = p.batch;
  const int64_t width = int64_t{p.num_qo_heads} * p.v.dims;
  const int64_t most =
      p.window_left < 0 ? std::numeric_limits<int32_t>::max() : int64_t{p.window_left} + 1;
  int64_t tokens = 0;
  int64_t pairs = 0;
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int64_t rows = batch.qo_indptr[s + 1] - batch.qo_indptr[s];
    if (rows == 0) continue;
    tokens += std::min<int64_t>(batch.kv_len[s], most + rows - 1);
    pairs += visible_keys(rows, batch.kv_len[s], most);
  }
  const int64_t element = dtype_info(p.k.dtype).block_bytes;
  const int64_t token_bytes =
      p.num_kv_heads * ((p.k.dims + p.k_rope.dims + p.v.dims) * element +
                        (p.k.scales != nullptr ? 4 : 0) + (p.v.scales != nullptr ? 4 : 0));
  Cost cost{batch.num_tokens * width * 4 + tokens * token_bytes, 4 * pairs * width};
  if (p.out != nullptr) cost.bytes += batch.num_tokens * width * 4;
  if (p.out_operand.data != nullptr) cost.bytes += batch.num_tokens * p.out_operand.row_bytes();
  return cost;
}

}  // namespace effinfer::ops
