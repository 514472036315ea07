// The two passes of attention scores over tensors that are checked.
#pragma once

#include "effinfer/threads.h"
#include "ops/attention_scores.h"

namespace effinfer::ops {

// Fills problem.out (zeros before), and problem.diagonals where it is set: [num_qo_heads, sum of
// kv_len], by the distance from the query back to the key. `items` of the problem are made here;
// without an lse it is computed first.
void run_score_passes(const AttentionScoresProblem& problem, float* diagonals, ThreadPool& pool);

}  // namespace effinfer::ops
