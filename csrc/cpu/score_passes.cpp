// One addition for each sum: memory limits it.
#include "ops/score_passes.h"

#include "cpu/level.h"

namespace effinfer::cpu {
namespace {

void add_item(const ops::FoldDiagonalsProblem& problem, const ops::ScoreItem& item, int64_t head) {
  const ops::AttentionScoresProblem& p = *problem.scores;
  const int64_t width = ops::diagonal_width(p, item);
  const float* from =
      p.diagonals + item.diagonals + head % (p.num_qo_heads / p.num_kv_heads) * width;
  float* to =
      problem.out + head * problem.starts[p.batch.num_sequences] + problem.starts[item.sequence];
  // The last row's distance to the item's first key.
  const int64_t farthest =
      p.batch.kv_len[item.sequence] - 1 - int64_t{item.first_unit} * ops::kUnitTokens;
  for (int64_t i = 0; i < width && i <= farthest; ++i) to[farthest - i] += from[i];
}

}  // namespace

template <>
void run<Level::portable>(const ops::FoldDiagonalsProblem& problem, Team& team) {
  const ops::AttentionScoresProblem& p = *problem.scores;
  const int32_t group = p.num_qo_heads / p.num_kv_heads;
  team.for_chunks(p.num_qo_heads, [&](int64_t head) {
    for (int64_t i = 0; i < p.num_items; ++i) {
      if (p.items[i].kv_head == head / group) add_item(problem, p.items[i], head);
    }
  });
}

}  // namespace effinfer::cpu
