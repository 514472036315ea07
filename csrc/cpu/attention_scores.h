// What the attention scores driver hands to the kernels of an ISA level: plain data and a function.
#pragma once

#include <cstdint>

#include "cpu/list_attention.h"
#include "ops/attention_scores.h"

namespace effinfer::cpu {

// One item. `list` says where its keys and the rows of its sequence lie, and what rows see.
struct AttentionScoresTile {
  ListAttentionTile list;    // num_rows: of the sequence; num_heads: of the KV head
  const int32_t* positions;  // of the rows; null: from list.position on
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

namespace portable {
extern void (*const kAttentionScores)(const AttentionScoresTile&);
}
namespace avx2 {
extern void (*const kAttentionScores)(const AttentionScoresTile&);
}
namespace avx512 {
extern void (*const kAttentionScores)(const AttentionScoresTile&);
}
namespace avx512bf16 {
extern void (*const kAttentionScores)(const AttentionScoresTile&);
}

// Rows times heads that are multiplied with the keys at a time, where one row's heads are not more:
// sums leave the registers that often, and their queries and scores stay in the second cache.
inline constexpr int64_t kScoreTileRows = 64;

inline constexpr int64_t scores_tile_rows(int64_t group) {
  return group < kScoreTileRows ? kScoreTileRows / group : 1;
}

// Bytes that an item needs: four units of keys; queries, scores, and the limits of what they see of
// a tile of rows; 16 rows of keys on their way, a row of zeros and a row of queries.
inline constexpr int64_t attention_scores_scratch(int64_t group, int64_t dim) {
  const int64_t rows = scores_tile_rows(group) * group;
  const int64_t keys = ops::kChunkUnits * ops::kUnitTokens;
  return 4 * (keys * dim + rows * (dim + ops::kUnitTokens + 3) + 18 * (dim + 16) + 64);
}

}  // namespace effinfer::cpu
