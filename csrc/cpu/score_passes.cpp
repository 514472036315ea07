// The passes beside the scores themselves: an addition for each sum and a store for each byte of a
// mask, which memory limits.
#include "ops/score_passes.h"

#include <algorithm>

#include "cpu/level.h"
#include "ops/bits.h"

namespace effinfer::cpu {
namespace {

void add_item(const ops::FoldDiagonalsProblem& problem, const ops::ScoreItem& item, int64_t head) {
  const ops::AttentionScoresProblem& p = *problem.scores;
  const int64_t width = ops::diagonal_width(p, item);
  const float* from = p.diagonals + item.diagonals + head % p.group() * width;
  float* to =
      problem.out + head * problem.starts[p.batch.num_sequences] + problem.starts[item.sequence];
  // The last row's distance to the item's first key.
  const int64_t farthest =
      p.batch.kv_len[item.sequence] - 1 - int64_t{item.first_unit} * ops::kUnitTokens;
  for (int64_t i = 0; i < width && i <= farthest; ++i) to[farthest - i] += from[i];
}

void set_row(const ops::PositionMaskProblem& problem, int64_t s, int64_t row) {
  const ops::AttentionScoresProblem& p = *problem.scores;
  const int64_t first = problem.starts[s] + (row - p.batch.qo_indptr[s]) * problem.strides[s];
  const int64_t position = p.positions[row];
  const int64_t length = p.batch.kv_len[s];
  const int64_t end = p.causal ? std::min(position + 1, length) : length;
  const int64_t begin = p.window_left >= 0 ? std::max<int64_t>(0, position - p.window_left) : 0;
  ops::set_bits(problem.bits, first + begin, first + end);
}

}  // namespace

template <>
void run<Level::portable>(const ops::PositionMaskProblem& problem, Team& team) {
  const ops::BatchLayout& batch = problem.scores->batch;
  team.for_chunks(batch.num_tokens, [&](int64_t row) {
    const int32_t* begin = batch.qo_indptr;
    const int32_t* end = begin + batch.num_sequences + 1;
    set_row(problem, std::upper_bound(begin, end, row) - begin - 1, row);
  });
}

template <>
void run<Level::portable>(const ops::FoldDiagonalsProblem& problem, Team& team) {
  const ops::AttentionScoresProblem& p = *problem.scores;
  team.for_chunks(p.num_qo_heads, [&](int64_t head) {
    for (int64_t i = 0; i < p.num_items; ++i) {
      if (p.items[i].kv_head == head / p.group()) add_item(problem, p.items[i], head);
    }
  });
}

}  // namespace effinfer::cpu
