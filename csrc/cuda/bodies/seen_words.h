// Which tokens a row of a tile sees, and where the tokens of its path lie.
//
// Every row counts its keys by places: the keys before it on its own path, one after the other. On
// a chain a place is a token of the sequence. A row of a tree of drafts (ops/kv_layout.h) has the
// tree's other branches between the tokens of its path:
//
//   token of the tree   0  1  2  3  4  5       the row of token 5 is at depth 3, with the ancestors
//   depth               0  1  2  2  3  3       0, 1 and 3: its places 0, 1, 2, 3 are tokens 0, 1,
//   3, 5
//
// In places causality and the window are those of a chain. A row that is displaced (its places are
// not its tokens) has its chunks multiplied by itself, with keys gathered into places, and so gets
// the bits that its path alone would give.
#pragma once

#include <cstdint>

#include "cuda/unit.h"

namespace effinfer::cuda {

// The rows of mma's 16-row operands: a tile's (row, head) pairs.
inline constexpr int kTileRows = 16;

struct TileRow {
  int32_t position;  // its own place
  int32_t rank;      // 0, or from 1 on the tile's displaced tokens; -1: there is no such row
  float scale;       // of scores, to binary logarithms; above 0
  float slope;       // ALiBi
};

// Rows of a pass over a chunk: those of one rank, or all.
inline constexpr int32_t kAllRanks = -1;

EFFINFER_DEVICE bool is_active(const TileRow& row, int32_t rank) {
  return row.rank >= 0 && (rank == kAllRanks || row.rank == rank);
}

// Whether a path leaves gaps: a word of ancestors, or 0 of a chain.
EFFINFER_DEVICE bool is_displaced(uint64_t path) {
  return (path & (path + 1)) != 0;
}

// Of a word that is not 0.
EFFINFER_DEVICE int32_t path_length(uint64_t path) {
  int32_t length = 0;
  for (; path != 0; path &= path - 1) ++length;
  return length;
}

// The token of a place; of places behind the path's end, which nothing sees, any.
EFFINFER_DEVICE int32_t token_of_place(int32_t place, uint64_t path, int32_t tree_start) {
  if (place < tree_start) return place;
  EFFINFER_NO_UNROLL
  for (int32_t i = tree_start; i < place; ++i) path &= path - 1;
  if (path == 0) return place;
  int32_t bit = 0;
  EFFINFER_NO_UNROLL
  for (uint64_t lowest = path & (~path + 1); lowest != 1; lowest >>= 1) ++bit;
  return tree_start + bit;
}

// What all rows of a tile have in common.
struct Visibility {
  int32_t num_tokens;
  int32_t window_left;
  int32_t sink_tokens;
  bool causal;
};

// The lowest `count` of 8 bits.
EFFINFER_DEVICE uint32_t first_bits(int32_t count) {
  if (count <= 0) return 0;
  return count >= 8 ? 0xffu : (1u << count) - 1;
}

// Which of the 8 places from `start` on a row sees.
EFFINFER_DEVICE uint32_t seen_places(const Visibility& all, int32_t position, int32_t start) {
  uint32_t seen = first_bits(all.num_tokens - start);
  if (all.causal) seen &= first_bits(position - start + 1);
  if (all.window_left >= 0) {
    seen &= ~first_bits(position - all.window_left - start) | first_bits(all.sink_tokens - start);
  }
  return seen;
}

}  // namespace effinfer::cuda
