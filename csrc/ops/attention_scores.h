// What keys get of attention: for each query head and key, the softmax probabilities of blocks of
// query rows summed up, or the greatest of them, while no more of the matrix exists than 64 by 64.
//
// The logarithm of each row's sum of exponentials is known before (attention without values gives
// it). An item is four units of 64 keys of one sequence and KV head: it gathers them once, or
// takes the engine's pages as they lie, and walks the query rows in order, so that each result is
// written by one member of a team and is the same bits for any of them.
#pragma once

#include <cstdint>
#include <string>

#include "ops/attention.h"

namespace effinfer::ops {

struct ScoreItem {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_unit;
  int32_t end_unit;
  int64_t diagonals;  // floats before its own in AttentionScoresProblem::diagonals
};

// Where the results of a sequence lie: (head, block of rows, key or block of keys).
struct ScoreRows {
  int64_t first;  // floats before its own
  int64_t head_stride;
  int64_t block_stride;
};

struct AttentionScoresProblem : AttentionLogits {
  const float* lse = nullptr;  // [T, num_qo_heads], natural logarithms
  float lse_factor = 1.0f;     // on GPUs: times this
  bool maximum = false;
  int32_t row_block = 0;            // rows whose positions have the same quotient by it; 0: all
  int32_t key_block = 1;            // keys of a result: a power of two up to 256
  const ScoreRows* rows = nullptr;  // [sequences]
  float* out = nullptr;             // zeros
  // For each item and query head of its KV head, sums over pairs of the same key - row: of a
  // sequence's n rows, [keys of the item + n - 1], the last row's first key first. On GPUs the
  // results, by the distance from a row back to its key, where `out` has keys. Zeros; null: none.
  float* diagonals = nullptr;
  const ScoreItem* items = nullptr;
  int64_t num_items = 0;
};

std::string describe(const AttentionScoresProblem& problem);

}  // namespace effinfer::ops
