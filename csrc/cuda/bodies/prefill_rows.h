// The rows of a warp of the prefill kernel: which blocks of keys they see.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// Places of rows next to each other, that of the first and of the last; low > high: there is none.
struct RowSpan {
  int32_t low;
  int32_t high;
};

// Of a warp's rows from `first` on, of a tile of so many.
EFFINFER_DEVICE RowSpan span_of(const TileRow* rows, int first, int num_rows) {
  const int end = num_rows < first + kTileRows ? num_rows : first + kTileRows;
  if (end <= first) return {1, 0};
  return {rows[first].position, rows[end - 1].position};
}

// Whether none of the rows sees any of the places [start, end), or all of them see all that is
// visited of it.
EFFINFER_DEVICE bool sees_none(const Visibility& all, const RowSpan& rows, int32_t start,
                               int32_t end) {
  if (rows.low > rows.high || start >= all.num_tokens) return true;
  if (all.causal && start > rows.high) return true;
  return all.window_left >= 0 && end <= rows.low - all.window_left && start >= all.sink_tokens;
}
EFFINFER_DEVICE bool sees_all(const Visibility& all, const RowSpan& rows, int32_t start,
                              int32_t end) {
  if (end > all.num_tokens || (all.causal && end > rows.low + 1)) return false;
  return all.window_left < 0 || start >= rows.high - all.window_left || end <= all.sink_tokens;
}

// Whether the lists of visits have all of a pass's chunk.
EFFINFER_DEVICE bool is_visited_whole(const ChunkPass& pass) {
  uint64_t words = pass.units == 0xf ? ~uint64_t{0} : 0;
  EFFINFER_UNROLL
  for (int i = 0; i < kChunkUnits; ++i) words &= pass.words[i];
  return words == ~uint64_t{0};
}

// A bit for each of a chunk's blocks of 32 tokens of which the rows see something.
EFFINFER_DEVICE uint32_t live_blocks(const Visibility& all, const RowSpan& rows,
                                     const ChunkPass& pass) {
  uint32_t live = 0;
  EFFINFER_UNROLL
  for (int b = 0; b < kChunkBlocks; ++b) {
    const int32_t start = pass.chunk * kChunkTokens + b * kBlock;
    if ((pass.units >> b / 2 & 1) == 0) continue;
    if (!sees_none(all, rows, start, start + kBlock)) live |= 1u << b;
  }
  return live;
}

}  // namespace effinfer::cuda
