// Scores of keys on GPUs, whose tensors are checked.
#pragma once

#include <vector>

#include "effinfer/ops/attention_scores.h"
#include "ops/attention_plan.h"
#include "ops/attention_scores.h"
#include "ops/score_pooling.h"

namespace effinfer::ops {

// Of a problem without lists and items; `rows` are the host's. Where it has no lse, that of the
// attention of the same keys is computed first.
void score_there(const AttentionGeometry& geometry, const AttentionSequences& sequences,
                 const AttentionScoresInputs& inputs, const AttentionPlan::Impl& plan,
                 const std::vector<ScoreRows>& rows, AttentionScoresProblem problem, Queue& queue);

// Of a problem without starts and blocks.
void pool_there(PoolScoresProblem problem, const std::vector<int64_t>& starts,
                const std::vector<int64_t>& blocks, Queue& queue);

}  // namespace effinfer::ops
