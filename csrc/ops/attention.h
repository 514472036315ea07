// Paged attention: decode, verification and chunked prefill are one kernel shape.
//
// A tile is some query rows of one sequence times the query heads of one KV head. Chunks of the
// sequence's KV start at multiples of kKvChunk tokens, whoever shares the step. Within a chunk a
// row keeps an online softmax over pages (running maximum, sum, unscaled output); the chunks'
// results are folded from left to right. Keys that a row does not see contribute exact zeros, and a
// fold with nothing changes nothing, so a row's result is the same bits for any batch, any tile and
// any team, and whether one work item does all chunks of a tile or an item each and a merge at the
// end.
#pragma once

#include <cstdint>
#include <string>

#include "ops/cost.h"
#include "ops/kv_layout.h"
#include "ops/operand.h"
#include "ops/visits.h"

namespace effinfer::ops {

inline constexpr int64_t kKvChunk = 256;
// Query rows of a tile at most (one token's group may be more): they share each K and V line in
// registers and cache. A multiple of the 6 rows of the AVX-512 register tile, and of most GQA
// ratios.
inline constexpr int64_t kAttentionTileRows = 48;

struct AttentionWorkItem {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_row;  // flat query rows [first_row, first_row + num_rows)
  int32_t num_rows;
  int32_t first_page;  // of the sequence's page list
  int32_t num_pages;
  // Index of the partial result of (first_row, head 0 of the group), then row-major; the item lies
  // in one chunk. -1: the item covers all keys of its rows and writes their output.
  int32_t partial;
  int32_t first_merge;  // merges [first_merge, first_merge + num_rows) follow the last partial item
};

// A row whose partial results are merged.
struct AttentionMergeItem {
  int32_t row;  // flat query row
  int32_t kv_head;
  int32_t first_partial;  // partials of this row's group for chunk c at first_partial + c * stride
  int32_t stride;
  int32_t num_partials;
};

// Made on the host once a step and shared by all layers with the same heads and window; the arrays
// live in memory reserved at compile time.
struct StepPlan {
  const AttentionWorkItem* items = nullptr;
  int64_t num_items = 0;
  const AttentionMergeItem* merges = nullptr;
  int64_t num_merges = 0;
  float* partial_out = nullptr;  // [num_partials, head_dim]
  float* partial_ms = nullptr;   // [num_partials, 2]: running max (natural log units) and sum
  // Of the items of a merge, how many are done; at first_merge of their rows. Zero between calls.
  int32_t* done = nullptr;
  bool one_tile = true;  // every sequence's rows are one tile: an item sees all of their group
};

// Appends K and V rows of a step to the cache, with what precedes the append: an optional RMS norm
// of each head (Qwen3, Gemma 3) and rotary embedding. With `q` it also norms and rotates the
// queries in place order: q_out[T, num_qo_heads * head_dim].
struct RopeAppendProblem {
  const float* q = nullptr;  // [T, num_qo_heads * head_dim]; null: append only
  int64_t q_stride = 0;
  const float* k = nullptr;  // [T, num_kv_heads * head_dim]
  int64_t k_stride = 0;
  const float* v = nullptr;
  int64_t v_stride = 0;
  float* q_out = nullptr;
  int64_t q_out_stride = 0;
  int32_t num_qo_heads = 0;
  const float* q_norm = nullptr;  // [head_dim]; null: none
  const float* k_norm = nullptr;
  float norm_eps = 0.0f;
  const float* cos_sin = nullptr;  // [T, 2, rope_dims / 2]; null: no rotation
  int32_t rope_dims = 0;           // leading dimensions of a head that rotate
  bool interleaved = false;        // pairs (2i, 2i+1) as in GGUF llama; else (i, i + rope_dims / 2)
  KvLayer kv;
  BatchLayout batch;
};

struct AttentionProblem {
  const float* q = nullptr;  // [T, num_qo_heads, head_dim], roped
  int64_t q_stride = 0;      // floats between rows
  int32_t num_qo_heads = 0;
  KvLayer kv;
  BatchLayout batch;
  StepPlan plan;
  float sm_scale = 1.0f;
  float logits_soft_cap = 0.0f;  // 0: none; else cap * tanh(score / cap)
  // Of the products of queries with keys and of probabilities with values, which are summed in
  // float32: f32, or bf16 (queries and probabilities rounded to it) on bf16 pages.
  Arithmetic arithmetic = Arithmetic::f32;
  int32_t window_left = -1;  // -1: none; a row at position p sees [p - window_left, p]
  int32_t sinks = 0;         // with a window: keys [0, sinks) are seen too
  VisitPlan visits;          // without a window; lists that the step has written before
  float* out = nullptr;      // [T, num_qo_heads * head_dim]
  int64_t out_stride = 0;
  // When its data is set, the result goes there as an operand and not to `out`; the columns of a KV
  // head's group must be whole blocks.
  Operand out_operand;
  // With `append.k` set, `q` is not read: an item first norms and rotates its rows and appends
  // those of their keys that its own pages hold, so that nothing else need precede it.
  // plan.one_tile only.
  RopeAppendProblem append;
};

// The shape part of the above: what planning needs.
struct AttentionShape {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t window_left = -1;
  int32_t sinks = 0;

  bool operator==(const AttentionShape&) const = default;
};

// Upper bounds for `max_tokens` rows, `max_sequences` sequences of at most `max_kv_len` tokens.
struct AttentionPlanSize {
  int64_t items = 0;
  int64_t merges = 0;
  int64_t partials = 0;
};
AttentionPlanSize attention_plan_size(const AttentionShape& shape, int64_t max_tokens,
                                      int64_t max_sequences, int64_t max_kv_len);

// Fills `plan` (whose arrays are of at least attention_plan_size) for a batch; no allocation.
struct AttentionPlanBuffers {
  AttentionWorkItem* items = nullptr;
  AttentionMergeItem* merges = nullptr;
  float* partial_out = nullptr;
  float* partial_ms = nullptr;
  int32_t* done = nullptr;  // [merges], zeros
};
StepPlan plan_attention(const AttentionShape& shape, const BatchLayout& batch,
                        const AttentionPlanBuffers& buffers);

// Rows of a list of visits: whole tiles of a sequence's rows.
int32_t visit_block_rows(int32_t num_qo_heads, int32_t num_kv_heads);

std::string describe(const AttentionProblem& problem);
std::string describe(const RopeAppendProblem& problem);
Cost cost(const AttentionProblem& problem);
Cost cost(const RopeAppendProblem& problem);

}  // namespace effinfer::ops
