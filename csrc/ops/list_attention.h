// Attention over rows of keys and values that lie as the caller has them, visiting lists of tokens.
//
// A tile is some query rows of one sequence times query heads of one KV head. Its list names the
// tokens of the sequence that it visits, as spans; dense attention is the list of all tokens. The
// kernel gathers the listed tokens, 64 at a time (a unit), into a page in the order of the products
// (ops/kv_layout.h), so that cost follows what is listed, whatever the layout and the sizes of
// pages and blocks; tiles of few rows multiply keys and values where they lie, in the same order.
// What a row sees of a unit is one 64-bit word: the listed tokens less those that causality, the
// window and the mask hide.
//
// Four units are a chunk. Units and chunks of dense lists begin at multiples of 64 and 256 tokens
// of the sequence, those of other lists at multiples of the list. Within a chunk a row keeps an
// online softmax, and chunks are folded from left to right: a row's result is the same bits for any
// batch and any number of threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "effinfer/dtype.h"

namespace effinfer::ops {

inline constexpr int32_t kUnitTokens = 64;
inline constexpr int32_t kChunkUnits = 4;
// Rows of a tile at most, where one token's heads are not more. Gathering 64 tokens costs about as
// much as 3 to 5 rows' products with them; the state of 128 rows (4 floats a dimension) still lies
// in a second cache of 512 KB.
inline constexpr int32_t kListTileRows = 128;
// Heads of one token in a tile at most: latent attention has 128 heads over one row of keys.
inline constexpr int32_t kListTileHeads = 32;

// Tokens [begin, end) of a sequence, the visits `first` on of its list.
struct TokenSpan {
  int32_t begin;
  int32_t end;
  int32_t first;
  int64_t mask_bit;  // of the list's first row and the span's first token
};

struct ListTile {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_row;  // flat query rows [first_row, first_row + num_rows)
  int32_t num_rows;
  int32_t first_head;  // query heads
  int32_t num_heads;
  int32_t first_span;
  int32_t num_spans;
  int32_t num_tokens;  // of the list
  int32_t phase;       // units before its first one in the first chunk
  int32_t list_row;    // first_row, counted within the list's block of rows

  int32_t num_units() const { return (num_tokens + kUnitTokens - 1) / kUnitTokens; }
  int32_t num_chunks() const { return (phase + num_units() + kChunkUnits - 1) / kChunkUnits; }
};

// Some units of a tile: all, or those of a few chunks, with a partial result of each chunk for each
// row and head.
struct ListItem {
  int32_t tile;
  int32_t first_unit;
  int32_t end_unit;
  int32_t partial;  // index of the first chunk's result of (first row, first head), then row-major,
                    // then chunk by chunk; -1: none
  int32_t merge;    // of the plan's merges; -1: none
};

struct ListMerge {
  int32_t tile;
  int32_t first_partial;
  int32_t num_partials;  // chunks, num_rows * num_heads partials apart
  int32_t num_items;
};

// What attention visits: made once for any number of calls with the same sequences.
struct ListPlan {
  std::vector<TokenSpan> spans;
  std::vector<ListTile> tiles;
  std::vector<ListItem> items;
  std::vector<ListMerge> merges;
  int64_t num_partials = 0;
};

// Rows of keys or values; strides in bytes.
struct KvRows {
  const uint8_t* data = nullptr;
  DType dtype = DType::f32;
  int32_t dims = 0;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  // Per token and head: float32 with the same three strides in floats; null: none.
  const float* scales = nullptr;
  int64_t scale_page_stride = 0;
  int64_t scale_token_stride = 0;
  int64_t scale_head_stride = 0;
};

// Query rows; strides in elements.
struct QueryRows {
  const uint8_t* data = nullptr;
  DType dtype = DType::f32;  // f32, f16, bf16
  int32_t dims = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

struct ListAttentionProblem {
  QueryRows q;
  QueryRows q_rope;  // more dimensions of the queries, with those of k_rope; dims 0: none
  KvRows k;
  KvRows k_rope;
  KvRows v;
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  const int32_t* qo_indptr = nullptr;
  const int32_t* kv_indptr = nullptr;
  const int32_t* pages = nullptr;  // page ids; null: token t of sequence s is row kv_indptr[s] + t
  int32_t page_size = 1;
  const int32_t* kv_len = nullptr;
  bool causal = false;
  int32_t window_left = -1;
  const uint8_t* mask = nullptr;  // packed, little-endian
  int64_t mask_bytes = 0;
  const int64_t* mask_row_strides = nullptr;  // [S] bits between rows
  float sm_scale = 1.0f;                      // times the factor of k's numbers
  float logits_soft_cap = 0.0f;
  float v_scale = 1.0f;
  const float* alibi_slopes = nullptr;  // [num_qo_heads]
  const float* sinks = nullptr;         // [num_qo_heads] logits of keys without values
  const ListPlan* plan = nullptr;
  float* partial_out = nullptr;  // [num_partials, v.dims rounded up to 16]
  float* partial_ms = nullptr;   // [num_partials, 2]
  int32_t* done = nullptr;       // [merges], zeros
  uint8_t* out = nullptr;        // [T, num_qo_heads, v.dims] of q's dtype
  float* lse = nullptr;          // [T, num_qo_heads]; null: none
  float lse_factor = 1.0f;       // on natural logarithms
};

std::string describe(const ListAttentionProblem& problem);

// The shape part: what planning needs.
struct ListShape {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  bool causal = false;
  int32_t window_left = -1;
};

struct SequenceRows {
  int64_t num_sequences = 0;
  const int32_t* qo_indptr = nullptr;
  const int32_t* kv_len = nullptr;
  const int64_t* mask_starts = nullptr;  // [S] bits; null: no mask
};

// Lists of a caller, one for each (sequence, KV head, block of query rows); every row and KV head
// is in exactly one.
struct TokenLists {
  int64_t num_lists = 0;
  const int32_t* lists = nullptr;      // [L, 4]: sequence, kv_head, first_row, num_rows
  const int32_t* indptr = nullptr;     // [L + 1] into spans
  const int32_t* spans = nullptr;      // [n, 2]: begin, end
  const int64_t* mask_bits = nullptr;  // [n]; null: no mask
};

ListPlan plan_dense(const ListShape& shape, const SequenceRows& rows);
ListPlan plan_lists(const ListShape& shape, const SequenceRows& rows, const TokenLists& lists);

}  // namespace effinfer::ops
