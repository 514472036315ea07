// What the drivers of the index kernels hand to an ISA level: scores of keys, distances and pages.
#pragma once

#include <cstdint>

#include "effinfer/dtype.h"

namespace effinfer::cpu {

// The keys of one KV head.
struct IndexKeys {
  DType dtype;
  int32_t head_dim;
  const uint8_t* k;      // this KV head in page 0
  const float* k_scale;  // i8 only
  int64_t page_bytes;    // between pages
  int64_t page_scales;
  const int32_t* pages;  // page ids of the sequence
};

inline constexpr int32_t kIndexRows = 64;  // of a tile at most

// Some rows of one query head: adds to `columns` what each key gets of their probabilities, and to
// `diagonals` what each distance does.
struct ColumnTile {
  IndexKeys keys;
  const float* q[kIndexRows];
  int32_t positions[kIndexRows];  // ascending
  int32_t num_rows;
  float sm_scale;
  float* columns;  // by token, up to the end of the last row's page
  // Distance d at last_position - d, and room for 64 more; null: none.
  float* diagonals;
  int32_t last_position;  // of the sequence
  float* scratch;         // column_scratch_floats()
};

// A block of rows of all query heads of one KV head: scores of the pages [0, num_pages), which hold
// all keys up to the block's last row.
struct BlockTile {
  IndexKeys keys;
  const float* q;  // first row, first head of the group
  int64_t q_stride;
  int32_t num_rows;
  int32_t position;  // of the first row
  int32_t group;
  int32_t stride;  // 0: means
  int32_t num_pages;
  float sm_scale;
  float* scores;   // [group][num_pages]
  float* scratch;  // block_scratch_floats()
};

struct PrefillIndexKernels {
  void (*columns)(const ColumnTile&);
  void (*blocks)(const BlockTile&);
};

// Queries, scores; maximum, sum, factor.
inline constexpr int64_t column_scratch_floats(int64_t head_dim) {
  return kIndexRows * (head_dim + 64 + 3);
}

// Rows of cells of a block: one for each head, or for each `stride` rows of a head.
inline constexpr int64_t block_cell_rows(int64_t group, int64_t rows, int64_t stride) {
  return group * (stride == 0 ? 1 : (rows + stride - 1) / stride);
}

// Queries, as vectors of 16 lanes with antidiagonals; products with a page; for each row and page
// the largest cell and the sum of exponentials below it.
inline constexpr int64_t block_scratch_floats(int64_t group, int64_t rows, int64_t stride,
                                              int64_t head_dim, int64_t pages) {
  const int64_t lanes = stride == 0 ? 1 : stride <= 16 ? 16 : stride;
  return block_cell_rows(group, rows, stride) * (lanes * head_dim + 64 + 2 * pages);
}

}  // namespace effinfer::cpu
