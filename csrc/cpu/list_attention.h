// What the list attention driver hands to the kernels of an ISA level: plain data and functions.
#pragma once

#include <cstdint>

#include "ops/list_attention.h"

namespace effinfer::cpu {

// One work item: units [first_unit, end_unit) of a tile.
struct ListAttentionTile {
  ops::QueryRows q;  // from the tile's first row and head on
  ops::QueryRows q_rope;
  ops::KvRows k;  // of the tile's KV head
  ops::KvRows k_rope;
  ops::KvRows v;
  const int32_t* pages;  // of the sequence; null: its tokens follow each other from first_token on
  int32_t page_size;
  int64_t first_token;

  int32_t num_rows;
  int32_t num_heads;  // tile row = row * num_heads + head
  const ops::TokenSpan* spans;
  int32_t num_spans;
  int32_t num_tokens;
  int32_t phase;
  int32_t first_unit;
  int32_t end_unit;

  int32_t position;  // of the first row in its sequence
  bool causal;
  int32_t window_left;
  const uint8_t* mask;
  int64_t mask_bytes;
  int64_t mask_row_stride;  // bits
  int32_t list_row;

  float sm_scale;
  float soft_cap;
  float v_scale;
  const float* alibi_slopes;  // [num_heads]
  const float* sinks;         // [num_heads]

  DType out_dtype;
  uint8_t* out;            // first row, first head
  int64_t out_row_stride;  // elements
  float* lse;
  int64_t lse_row_stride;
  float lse_factor;
  float* partial_out;  // [chunks, tile rows, v dims rounded up to 16]; null: write out
  float* partial_ms;   // [chunks, tile rows, 2]
  uint8_t* scratch;    // list_attention_scratch()

  // The member's next item, whose first keys and values are fetched during this one's last unit;
  // null: none. Called once.
  const ListAttentionTile* (*following)(void* context);
  void* context;
};

// The partial results of a tile's chunks, folded in order; the tile says where results go.
struct ListAttentionMerge {
  const float* partial_out;
  const float* partial_ms;
  int32_t num_partials;
};

struct ListAttentionKernels {
  void (*tile)(const ListAttentionTile&);
  void (*merge)(const ListAttentionTile&, const ListAttentionMerge&);
};

namespace portable {
extern const ListAttentionKernels kListAttention;
}
namespace avx2 {
extern const ListAttentionKernels kListAttention;
}
namespace avx512 {
extern const ListAttentionKernels kListAttention;
}
namespace avx512bf16 {
extern const ListAttentionKernels kListAttention;
}

inline constexpr int64_t round_up_16(int64_t dims) {
  return (dims + 15) / 16 * 16;
}

// Bytes that an item of `rows` tile rows needs: queries, scores, output of a chunk and of all, five
// numbers a row; a unit's keys and values; 16 rows on their way into it; a row of zeros and a row
// of results.
inline constexpr int64_t list_attention_scratch(int64_t rows, int64_t dim_qk, int64_t dim_vo) {
  const int64_t widest = dim_qk > dim_vo ? dim_qk : dim_vo;
  return 4 * (rows * (dim_qk + ops::kUnitTokens + 2 * dim_vo + 5) + 16 +
              ops::kUnitTokens * (dim_qk + dim_vo) + 18 * (widest + 16)) +
         8 * rows + 256;
}

}  // namespace effinfer::cpu
