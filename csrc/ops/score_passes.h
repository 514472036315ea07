// The two passes of attention scores over tensors that are checked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "effinfer/threads.h"
#include "ops/attention_scores.h"
#include "ops/cost.h"

namespace effinfer::ops {

// Fills problem.out (zeros before), and problem.diagonals where it is set: [num_qo_heads, sum of
// kv_len], by the distance from the query back to the key. `items` of the problem are made here;
// without an lse it is computed first.
void run_score_passes(const AttentionScoresProblem& problem, float* diagonals, ThreadPool& pool);

// Distances that an item sums up.
inline int64_t diagonal_width(const AttentionScoresProblem& p, const ScoreItem& item) {
  const int64_t end = std::min(item.end_unit * kUnitTokens, p.batch.kv_len[item.sequence]);
  const int64_t rows = p.batch.qo_indptr[item.sequence + 1] - p.batch.qo_indptr[item.sequence];
  return end - int64_t{item.first_unit} * kUnitTokens + rows - 1;
}

// The diagonals of a problem's items, added in the order of the keys: the last pass. A head is one
// chunk.
struct FoldDiagonalsProblem {
  const AttentionScoresProblem* scores = nullptr;  // whose items and diagonals are filled
  const int64_t* starts = nullptr;                 // [S + 1] of the sequences, in keys
  float* out = nullptr;                            // [num_qo_heads, starts[S]]
};

// Bits of what each row sees, for rows whose positions do not follow each other: those of row i of
// sequence s from bit starts[s] + i * strides[s] on, all multiples of 8. A row is one chunk.
struct PositionMaskProblem {
  const AttentionScoresProblem* scores = nullptr;  // whose positions, causality and window
  const int64_t* starts = nullptr;                 // [S]
  const int64_t* strides = nullptr;                // [S]
  uint8_t* bits = nullptr;                         // zeros
};

std::string describe(const FoldDiagonalsProblem& problem);
std::string describe(const PositionMaskProblem& problem);
Cost cost(const FoldDiagonalsProblem& problem);

}  // namespace effinfer::ops
