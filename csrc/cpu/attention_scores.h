// What the attention scores driver hands to the kernels of an ISA level: plain data and functions.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "ops/attention_scores.h"

namespace effinfer::cpu {

// One item. `keys` says where its keys and the rows of its sequence lie, and what rows see.
struct ScoresTask {
  AttentionTask keys;        // num_rows: of the sequence; num_heads: of the KV head
  const int32_t* positions;  // of the rows; null: from keys.position on
  const float* lse;          // first row, first head
  int64_t lse_row_stride;
  bool maximum;
  int32_t row_block;
  int32_t key_block;
  float* out;  // of the first head and block of rows, and the sequence's first key
  int64_t head_stride;
  int64_t block_stride;
  float* diagonals;
};

struct ScoresKernels {
  void (*pages)(const ScoresTask&);
  void (*rows)(const ScoresTask&);
};

// Rows times heads that are multiplied with the keys at a time, where one row's heads are not more:
// sums leave the registers that often, and their queries and scores stay in the second cache.
inline constexpr int64_t kScoreTileRows = 64;

inline constexpr int64_t scores_tile_rows(int64_t group) {
  return group < kScoreTileRows ? kScoreTileRows / group : 1;
}

// Bytes that an item needs: four units of keys and their scales; queries, scores, and the limits of
// what they see of a tile of rows; 16 rows of keys on their way, a row of zeros and a row of
// queries.
inline constexpr int64_t attention_scores_scratch(int64_t group, int64_t dim) {
  const int64_t rows = scores_tile_rows(group) * group;
  const int64_t keys = ops::kChunkUnits * ops::kUnitTokens;
  return 4 * (keys * (dim + 1) + rows * (dim + ops::kUnitTokens + 3) + 18 * (dim + 16) + 64);
}

}  // namespace effinfer::cpu
