// What the drivers of the index kernels hand to an ISA level: scores of keys, distances and pages.
#pragma once

#include <cstdint>

#include "effinfer/dtype.h"
#include "ops/attention.h"
#include "ops/kv_layout.h"

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

inline IndexKeys index_keys(const ops::KvLayer& kv, const ops::BatchLayout& batch, int64_t sequence,
                            int64_t kv_head) {
  IndexKeys keys = {};
  keys.dtype = kv.dtype;
  keys.head_dim = kv.head_dim;
  keys.k = kv.k_head(0, kv_head);
  keys.page_bytes = static_cast<int64_t>(kv.head_bytes()) * kv.num_kv_heads;
  if (kv.dtype == DType::i8) {
    keys.k_scale = kv.k_scale + kv_head * ops::kPageSize;
    keys.page_scales = kv.num_kv_heads * ops::kPageSize;
  }
  keys.pages = batch.kv_indices + batch.kv_indptr[sequence];
  return keys;
}

inline constexpr int32_t kIndexRows = 64;  // of a tile at most

// Some rows of query heads of one KV head: adds to `columns` what each key gets of their
// probabilities, and to `diagonals` what each distance does; or takes the greater of both.
struct ColumnTile {
  IndexKeys keys;
  const float* q[kIndexRows];
  int32_t positions[kIndexRows];  // ascending; rows of several heads have the same
  float factors[kIndexRows];      // on their probabilities
  int32_t num_rows;
  bool maximum;
  float sm_scale;
  const float* noise;  // by token, added to logits `noise_scale` times; null: none
  float noise_scale;
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
  int32_t stride;  // 0: means,
  bool probe;      // whose rows are weighted
  int32_t num_pages;
  float sm_scale;
  float* scores;   // [group][num_pages]
  float* scratch;  // block_scratch_floats()
};

struct PrefillIndexKernels {
  void (*columns)(const ColumnTile&);
  void (*blocks)(const BlockTile&);
};

// Queries, scores; 16 maxima, sums and maxima again of each row.
inline constexpr int64_t column_scratch_floats(int64_t head_dim) {
  return kIndexRows * (head_dim + 64 + 3 * 16);
}

inline constexpr int64_t kIndexCellRows = 4;  // rows of cells that are multiplied at a time

// Means of queries and their products with a page; of probe queries the rows' mean, what their
// squared distances from it are multiplied by, and weights. Antidiagonals: products of some rows of
// cells and sums of neighbours; queries, and zeros; these again, 16 lanes of each row of cells;
// cells.
inline constexpr int64_t block_scratch_floats(int64_t group, int64_t rows, int64_t stride,
                                              int64_t head_dim, int64_t pages) {
  if (stride == 0) return group * (3 * head_dim + 64) + rows;
  const int64_t cell_rows = group * ((rows + stride - 1) / stride);
  const int64_t lanes = stride <= 16 ? 16 : stride;
  const int64_t cells = (pages * (64 / stride) + 15) / 16 * 16;
  return kIndexCellRows * (64 + 32) + (group * rows + 1) * head_dim +
         cell_rows * (lanes * head_dim + cells);
}

}  // namespace effinfer::cpu
