#include "effinfer/ops/attention_scores.h"

#include <algorithm>
#include <string>
#include <vector>

#include "ops/attention_plan.h"
#include "ops/attention_tensors.h"
#include "ops/score_passes.h"
#include "ops/scores_there.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

void check_positions(const Validator& check, const TensorView& positions,
                     const AttentionPlan::Impl& plan) {
  const auto* values = static_cast<const int32_t*>(positions.data);
  for (size_t s = 0; s < plan.kv_len.size(); ++s) {
    for (int32_t row = plan.qo_indptr[s]; row < plan.qo_indptr[s + 1]; ++row) {
      if (values[row] >= 0 && values[row] < plan.kv_len[s]) continue;
      check.expect(false, indexed("positions", row),
                   "a value in [0, " + std::to_string(plan.kv_len[s]) + "), the sequence's tokens",
                   std::to_string(values[row]));
    }
  }
}

void check_diagonals(const Validator& check, const AttentionScoresInputs& inputs,
                     const AttentionPlan::Impl& plan) {
  check.expect(plan.geometry.causal, "diagonals", "False without causal", "True");
  check.expect(inputs.reduce == ScoreReduce::sum, "diagonals", "False with reduce max", "True");
  check.expect(inputs.positions.dims.rank() == 0, "diagonals", "False with positions", "True");
  for (size_t s = 0; s < plan.kv_len.size(); ++s) {
    const int32_t rows = plan.qo_indptr[s + 1] - plan.qo_indptr[s];
    check.expect(rows <= kMaxDiagonalRows, "diagonals",
                 "at most " + std::to_string(kMaxDiagonalRows) + " query rows a sequence",
                 std::to_string(rows));
  }
}

// In natural logarithms.
std::vector<float> natural(const AttentionScoresInputs& inputs) {
  const auto* values = static_cast<const float*>(inputs.lse.data);
  std::vector<float> lse(values, values + inputs.lse.dims.num_elements());
  for (float& x : lse) x /= inputs.lse_factor;
  return lse;
}

// Both passes have one arithmetic, that of attention of a few rows.
Arithmetic arithmetic_of_passes(const AttentionLogits& logits) {
  AttentionProblem problem;
  static_cast<AttentionLogits&>(problem) = logits;
  problem.decode = true;
  return arithmetic_of_products(problem);
}

}  // namespace

void attention_scores(const AttentionGeometry& geometry, const AttentionSequences& sequences,
                      const AttentionScoresInputs& inputs, float* out, float* diagonals,
                      const Executor& executor) {
  const Validator check("attention_scores", executor.device());
  const AttentionPlan::Impl plan(geometry, sequences);
  Queue* const queue = executor.queue();
  if (queue != nullptr) {
    check.expect(inputs.kv == nullptr, "k", "an array on a GPU", "a PagedKv, which the host has");
  }
  if (diagonals != nullptr) check_diagonals(check, inputs, plan);
  const AttentionTensors tensors(check, plan, inputs.order);
  AttentionScoresProblem p;
  static_cast<AttentionLogits&>(p) = tensors.logits(inputs, geometry.head_dim_qk);
  if (queue == nullptr) p.arithmetic = arithmetic_of_passes(p);
  if (inputs.positions.dims.rank() > 0) {
    check.dtype("positions", inputs.positions, DType::i32);
    check.shape("positions", inputs.positions, {plan.num_rows()});
    if (queue == nullptr) check_positions(check, inputs.positions, plan);
    p.positions = static_cast<const int32_t*>(inputs.positions.data);
  }
  std::vector<float> lse;
  if (inputs.lse.dims.rank() > 0) {
    check.dtype("lse", inputs.lse, DType::f32);
    check.shape("lse", inputs.lse, {plan.num_rows(), geometry.num_qo_heads});
    if (queue == nullptr) lse = natural(inputs);
    p.lse = queue == nullptr ? lse.data() : static_cast<const float*>(inputs.lse.data);
    p.lse_factor = queue == nullptr ? 1.0f : inputs.lse_factor;
  }
  p.maximum = inputs.reduce == ScoreReduce::max;
  int64_t total = 0;
  std::vector<ScoreRows> rows;
  for (const int32_t length : plan.kv_len) {
    rows.push_back({total, 0, 0});
    total += length;
  }
  for (ScoreRows& row : rows) row.head_stride = total;
  p.out = out;
  if (queue != nullptr) {
    check_aligned(check, "q", inputs.q);
    check_aligned(check, "k", inputs.k);
    const auto bytes = static_cast<size_t>(total * geometry.num_qo_heads) * sizeof(float);
    for (float* sums : {out, diagonals}) {
      if (sums != nullptr && bytes > 0) queue->zero(sums, bytes);
    }
    p.diagonals = diagonals;
    return score_there(p, static_cast<int64_t>(plan.kv_indices.size()), rows, *queue);
  }
  p.rows = rows.data();
  std::fill(out, out + total * geometry.num_qo_heads, 0.0f);
  if (diagonals != nullptr) std::fill(diagonals, diagonals + total * geometry.num_qo_heads, 0.0f);
  run_score_passes(p, diagonals, *executor.pool());
}

std::string describe(const AttentionScoresProblem& p) {
  return "[attention_scores] heads=" + std::to_string(p.num_qo_heads) +
         " kv_heads=" + std::to_string(p.num_kv_heads) + " head_dim=" + std::to_string(p.k.dims) +
         " dtype=" + std::string(name(p.q.dtype)) + " kv_dtype=" + std::string(name(p.k.dtype));
}

}  // namespace effinfer::ops
