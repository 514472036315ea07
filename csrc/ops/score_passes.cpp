#include "ops/score_passes.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "ops/attention_tensors.h"
#include "ops/describe.h"
#include "ops/registry.h"

namespace effinfer::ops {
namespace {

// What rows at positions of their own see.
struct PositionMask {
  PositionMask(const AttentionScoresProblem& p, ThreadPool& pool) {
    int64_t bytes = 0;
    for (int32_t s = 0; s < p.batch.num_sequences; ++s) {
      const int64_t row_bytes = (int64_t{p.batch.kv_len[s]} + 7) / 8;
      starts.push_back(8 * bytes);
      strides.push_back(8 * row_bytes);
      bytes += (p.batch.qo_indptr[s + 1] - p.batch.qo_indptr[s]) * row_bytes;
    }
    bits.resize(static_cast<size_t>(bytes));
    PositionMaskProblem problem;
    problem.scores = &p;
    problem.starts = starts.data();
    problem.strides = strides.data();
    problem.bits = bits.data();
    run_alone(problem, pool);
  }

  std::vector<int64_t> starts;   // bits
  std::vector<int64_t> strides;  // bits
  std::vector<uint8_t> bits;
};

// Attention without values: its logarithms of sums are all there is.
std::vector<float> lse_pass(const AttentionScoresProblem& given, ThreadPool& pool) {
  AttentionProblem p;
  static_cast<AttentionLogits&>(p) = given;
  p.v = given.k;
  p.v.dims = 0;
  p.v.scales = nullptr;
  p.decode = true;
  std::optional<PositionMask> mask;
  if (given.positions != nullptr) {
    mask.emplace(given, pool);
    p.positions = nullptr;
    p.causal = false;
    p.window_left = -1;
    p.mask = mask->bits.data();
    p.mask_bytes = static_cast<int64_t>(mask->bits.size());
    p.mask_starts = mask->starts.data();
    p.mask_row_strides = mask->strides.data();
  }
  std::vector<float> lse(static_cast<size_t>(p.batch.num_tokens * p.num_qo_heads));
  uint8_t nothing = 0;
  p.out = &nothing;
  p.lse = lse.data();
  plan_and_run(p, pool);
  return lse;
}

}  // namespace

std::string describe(const FoldDiagonalsProblem& problem) {
  const AttentionScoresProblem& p = *problem.scores;
  return "[fold_diagonals]" + field("heads", p.num_qo_heads) + field("items", p.num_items) +
         field("keys", problem.starts[p.batch.num_sequences]);
}

std::string describe(const PositionMaskProblem& problem) {
  const AttentionScoresProblem& p = *problem.scores;
  return "[position_mask]" + field("rows", p.batch.num_tokens) +
         field("window_left", p.window_left) + (p.causal ? " causal" : "");
}

Cost cost(const FoldDiagonalsProblem& problem) {
  const AttentionScoresProblem& p = *problem.scores;
  int64_t sums = 0;
  for (int64_t i = 0; i < p.num_items; ++i) sums += p.group() * diagonal_width(p, p.items[i]);
  return {12 * sums, sums};
}

void run_score_passes(const AttentionScoresProblem& given, float* diagonals, ThreadPool& pool) {
  AttentionScoresProblem p = given;
  std::vector<ScoreItem> items;
  int64_t sums = 0;
  for (int32_t s = 0; s < p.batch.num_sequences; ++s) {
    if (p.batch.qo_indptr[s] == p.batch.qo_indptr[s + 1]) continue;
    const int32_t units = (p.batch.kv_len[s] + kUnitTokens - 1) / kUnitTokens;
    for (int32_t head = 0; head < p.num_kv_heads; ++head) {
      for (int32_t unit = 0; unit < units; unit += kChunkUnits) {
        items.push_back({s, head, unit, std::min(unit + kChunkUnits, units), sums});
        sums += p.group() * diagonal_width(p, items.back());
      }
    }
  }
  if (items.empty()) return;
  std::vector<float> lse;
  if (p.lse == nullptr) {
    lse = lse_pass(p, pool);
    p.lse = lse.data();
  }
  std::vector<float> partial_diagonals;
  if (diagonals != nullptr) {
    partial_diagonals.resize(static_cast<size_t>(sums));
    p.diagonals = partial_diagonals.data();
  }
  p.items = items.data();
  p.num_items = static_cast<int64_t>(items.size());
  run_alone(p, pool);
  if (diagonals == nullptr) return;
  std::vector<int64_t> starts = {0};
  for (int32_t s = 0; s < p.batch.num_sequences; ++s) {
    starts.push_back(starts.back() + p.batch.kv_len[s]);
  }
  FoldDiagonalsProblem fold;
  fold.scores = &p;
  fold.starts = starts.data();
  fold.out = diagonals;
  run_alone(fold, pool);
}

}  // namespace effinfer::ops
