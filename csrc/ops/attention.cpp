#include "ops/attention.h"

#include <algorithm>
#include <limits>

namespace effinfer::ops {
namespace {

std::string describe_kv(const KvLayer& kv) {
  return " kv_heads=" + std::to_string(kv.num_kv_heads) +
         " head_dim=" + std::to_string(kv.head_dim) + " kv_dtype=" + std::string(name(kv.dtype));
}

// Bytes of K and V of one token, all heads.
int64_t kv_token_bytes(const KvLayer& kv) {
  const int64_t head = int64_t{kv.head_dim} * dtype_info(kv.dtype).block_bytes;
  return 2 * kv.num_kv_heads * (head + (kv.dtype == DType::i8 ? 4 : 0));
}

// The keys that all rows of a sequence see together: row i of n sees the last of
// kv_len - n + i + 1 keys, at most `most` of them.
int64_t visible_keys(int64_t rows, int64_t kv_len, int64_t most) {
  const int64_t first = kv_len - rows + 1;
  const int64_t growing = std::clamp<int64_t>(most - first + 1, 0, rows);
  return growing * first + growing * (growing - 1) / 2 + (rows - growing) * most;
}

}  // namespace

std::string describe(const AttentionProblem& problem) {
  std::string text = "[attention] heads=" + std::to_string(problem.num_qo_heads) +
                     describe_kv(problem.kv) + " window=" + std::to_string(problem.window_left) +
                     " soft_cap=" + std::to_string(problem.logits_soft_cap);
  if (problem.arithmetic != Arithmetic::f32) {
    text += " arithmetic=" + std::string(name(problem.arithmetic));
  }
  if (problem.visits.list_words > 0) text += " visits";
  if (problem.out_operand.cols > 0) {
    text += " out=" + std::string(name(problem.out_operand.arithmetic));
  }
  return text;
}

std::string describe(const RopeAppendProblem& problem) {
  return "[rope_append] heads=" + std::to_string(problem.num_qo_heads) + describe_kv(problem.kv) +
         " rope_dims=" + std::to_string(problem.rope_dims) +
         (problem.interleaved ? " interleaved" : "") +
         (problem.q_norm != nullptr ? " q_norm" : "") +
         (problem.k_norm != nullptr ? " k_norm" : "");
}

// A sequence's keys are read once, whatever the number of its rows and of tiles. With lists of
// visits, whose sizes only the step knows: as if all keys were visited.
Cost cost(const AttentionProblem& problem) {
  const BatchLayout& batch = problem.batch;
  const int64_t width = int64_t{problem.num_qo_heads} * problem.kv.head_dim;
  const int64_t most = problem.window_left < 0 ? std::numeric_limits<int32_t>::max()
                                               : int64_t{problem.window_left} + 1;
  int64_t tokens = 0;
  int64_t pairs = 0;
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int64_t rows = batch.qo_indptr[s + 1] - batch.qo_indptr[s];
    if (rows == 0) continue;
    tokens += std::min<int64_t>(batch.kv_len[s], most + rows - 1);
    pairs += visible_keys(rows, batch.kv_len[s], most);
  }
  Cost cost{batch.num_tokens * width * 4 + tokens * kv_token_bytes(problem.kv), 4 * pairs * width};
  if (problem.out != nullptr) cost.bytes += batch.num_tokens * width * 4;
  if (problem.out_operand.data != nullptr)
    cost.bytes += batch.num_tokens * problem.out_operand.row_bytes();
  return cost;
}

Cost cost(const RopeAppendProblem& problem) {
  const int64_t rows = problem.batch.num_tokens;
  const int64_t q = problem.q != nullptr ? int64_t{problem.num_qo_heads} * problem.kv.head_dim : 0;
  const int64_t k = int64_t{problem.kv.num_kv_heads} * problem.kv.head_dim;
  const int64_t table = problem.cos_sin != nullptr ? problem.rope_dims : 0;
  const int64_t row = q * 8 + k * 8 + table * 4 + kv_token_bytes(problem.kv);
  const int64_t norms =
      (problem.q_norm != nullptr ? q * 4 : 0) + (problem.k_norm != nullptr ? k * 4 : 0);
  return {rows * row, rows * (norms + (table > 0 ? (q + k) * 3 : 0))};
}

}  // namespace effinfer::ops
