// What the attention driver hands to the kernels of an ISA level: plain data and functions.
#pragma once

#include <cstdint>

#include "ops/attention.h"
#include "ops/mass_rule.h"

namespace effinfer::cpu {

// Units [first_unit, end_unit) of a tile, less those between sink_units and first_seen.
struct AttentionTask {
  ops::QueryRows q;  // from the tile's first row and head on
  ops::QueryRows q_rope;
  // Of keys in chunks of so many kChunkTokens, 0: those of other chunks than `own_chunk`.
  ops::QueryRows q_before;
  ops::QueryRows q_far;
  int32_t chunk;
  int32_t own_chunk;
  ops::KvRows k;  // of the tile's KV head
  ops::KvRows k_rope;
  ops::KvRows v;
  ops::CodedPages coded;  // from the tile's KV head on, but for features, which heads share
  int32_t kv_head;
  const int32_t* pages;  // of the sequence; null: its tokens follow each other from first_token on
  int32_t page_size;
  int64_t first_token;

  int32_t num_rows;
  int32_t num_heads;            // tile row = row * num_heads + head
  const ops::TokenSpan* spans;  // a list; null: all tokens,
  int32_t num_spans;
  const uint64_t* words;  // or those whose bit is set, a word for each 64 of the sequence
  int32_t num_tokens;     // as in AttentionTile
  int32_t first_unit;
  int32_t end_unit;
  int32_t sink_units;
  int32_t first_seen;

  int32_t position;  // of the first row in its sequence
  bool causal;
  int32_t window_left;
  int32_t sink_tokens;
  const uint64_t* ancestors;  // of the tile's rows, as in BatchLayout; null: a chain
  int32_t tree_start;         // of a tree: place of its first token
  const uint8_t* mask;
  int64_t mask_bytes;
  int64_t mask_start;       // bit of (list_row 0, token 0); of lists the spans tell
  int64_t mask_row_stride;  // bits
  int32_t list_row;

  float q_scale;      // on queries before they are rounded,
  float score_scale;  // and on their products
  float soft_cap;
  float v_scale;
  const float* alibi_slopes;  // [num_heads]
  const float* sink_logits;   // [num_heads]
  const float* first_logits;  // [num_heads], added to those of the sequence's first key; null: none
  const float* log_weights;   // by slot, of a plane or of the list; null: none

  DType out_dtype;
  uint8_t* out;            // first row, first head
  int64_t out_row_stride;  // elements
  float* lse;
  int64_t lse_row_stride;
  float lse_factor;
  float* kept;          // numbers of ops::KeptWeights, of a tile of one row; null: nothing is kept
  float* kept_weights;  // of the units from first_unit on, the member's from
  int64_t kept_place;   // so many on
  int32_t member;       // of the team
  float* partial_out;   // [chunks, tile rows, v dims rounded up to 16]; null: write out
  float* partial_ms;    // [chunks, tile rows, 2]
  uint8_t* scratch;     // attention_scratch_bytes()

  // The member's next task, whose first keys and values are fetched during this one's last unit;
  // null: none. Called at most once, and only of rows.
  const AttentionTask* (*following)(void* context);
  void* context;
};

// The partial results of a tile's chunks, folded in order; the task says where results go.
struct AttentionFold {
  const float* partial_out;
  const float* partial_ms;
  int32_t num_partials;
};

// What the heads of a row have kept, all of whose tasks have ended.
struct KeptRow {
  float* numbers;  // of the tasks
  int32_t num_heads;
  int32_t num_pages;  // of the row's sequence, up to it
};

struct AttentionKernels {
  void (*pages)(const AttentionTask&);
  void (*rows)(const AttentionTask&);
  void (*fold)(const AttentionTask&, const AttentionFold&);
  // Makes the factors from weights to probabilities, once, before
  void (*end_kept)(const KeptRow&);
  // what keys get of the row goes into `columns`, by token: of those whose task `member` had, from
  // its weights.
  void (*add_kept)(const KeptRow&, const ops::MassRule&, int32_t member, const float* weights,
                   float* columns);
};

inline constexpr int64_t round_up_16(int64_t dims) {
  return (dims + 15) / 16 * 16;
}

// Lines of values behind the last token of a unit, of the products on tiles.
inline constexpr int64_t attention_spare_floats(int64_t dim_vo) {
  return 16 * dim_vo;
}

// What a task of `rows` tile rows needs. Rows may be padded, to no more than the next multiple of
// 16: queries, scores, output of a chunk and of all, sums in lanes, five numbers; a unit's
// keys, values and their scales; 16 rows on their way into it; a row of zeros and one of queries;
// what each token's rows see.
inline constexpr int64_t attention_scratch_bytes(int64_t rows, int64_t dim_qk, int64_t dim_vo) {
  const int64_t widest = dim_qk > dim_vo ? dim_qk : dim_vo;
  return 4 * (round_up_16(rows) * (dim_qk + ops::kUnitTokens + 2 * dim_vo + 16 + 5) +
              attention_spare_floats(dim_vo) + ops::kUnitTokens * (dim_qk + dim_vo + 2) +
              18 * (widest + 16)) +
         8 * (rows + 8);
}

}  // namespace effinfer::cpu
