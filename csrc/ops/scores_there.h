// Scores of keys on GPUs, whose tensors are checked.
#pragma once

#include <vector>

#include "effinfer/executor.h"
#include "ops/attention_scores.h"
#include "ops/score_pooling.h"

namespace effinfer::ops {

// Of a problem without items; its lists, of `num_listed` pages, and `rows` are the host's, the
// others the device's. Where it has no lse, that of the attention of the same keys is computed
// first.
void score_there(AttentionScoresProblem problem, int64_t num_listed,
                 const std::vector<ScoreRows>& rows, Queue& queue);

// Of a problem without starts and blocks.
void pool_there(PoolScoresProblem problem, const std::vector<int64_t>& starts,
                const std::vector<int64_t>& blocks, Queue& queue);

}  // namespace effinfer::ops
