// Which tokens blocks of query rows visit, chosen from what queries and keys look like: the lists
// of sparse attention. Each method lists keys of every query head; our lists are of KV heads, and
// have what any head of its group chose.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/ops/attention.h"
#include "effinfer/ops/block_lists.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"
#include "effinfer/top_scores.h"

namespace effinfer::ops {

// The rows of a batch in blocks: those whose positions have the same quotient by block_size. A
// sequence's rows are its last tokens. Whatever is chosen, a block lists the tokens at its rows'
// own positions, the first `sink_tokens` ones and the `local_tokens` ones up to each row; and no
// token that all its rows are hidden from.
struct IndexRows {
  std::string_view op;   // what errors begin with
  TensorView qo_indptr;  // int32 [S + 1], from 0
  TensorView kv_len;     // int32 [S]
  int32_t num_kv_heads = 0;
  int32_t block_size = 64;
  bool causal = true;
  int32_t sink_tokens = 0;
  int32_t local_tokens = 0;
};

// All of the functions below throw InvalidArgument.

// The first tokens and the nearest ones only.
EFFINFER_API BlockLists a_shape_lists(const IndexRows& rows, ThreadPool& pool);

// Columns: keys, the same for all rows of a sequence. Slashes: keys at a distance behind each row.
struct ColumnScores {
  TensorView columns;  // float32 [num_qo_heads, sum of kv_len], as of attention_scores()
  TopScores top_columns;
  TensorView slashes;  // the same by distance, as its diagonals; rank 0: none
  TopScores top_slashes;
};
EFFINFER_API BlockLists column_lists(const IndexRows& rows, const ColumnScores& scores,
                                     ThreadPool& pool);

// Blocks of keys, block_size of them, other ones for each block of rows.
enum class BlockMethod {
  mean,         // the means of a block's queries and keys
  antidiagonal  // every stride-th antidiagonal of the products
};
struct BlockScoreInputs {
  StridedView q;  // as in LogitInputs; k: f32, f16 or bf16
  StridedView k;
  KvOrder order = KvOrder::nhd;
  float sm_scale = 1.0f;
  BlockMethod method = BlockMethod::mean;
  int32_t stride = 8;  // of antidiagonals; block_size is a multiple of it
  TopScores top;
};
// `geometry` and `sequences` are those of the attention; their lists are `rows`' too. q and k lie
// where the scores are made; of a GPU the host waits for them, and `pool` makes the lists.
EFFINFER_API BlockLists block_score_lists(const IndexRows& rows, const AttentionGeometry& geometry,
                                          const AttentionSequences& sequences,
                                          const BlockScoreInputs& inputs, const Executor& executor,
                                          ThreadPool& pool);

// Pages: one list for all rows of a sequence and KV head, with the pages that have the highest
// scores in any head of the group. scores: float32 [heads, sum of ceil(kv_len / page_size)], for
// query heads or KV heads. rows.block_size is not used.
EFFINFER_API BlockLists page_lists(const IndexRows& rows, const TensorView& scores,
                                   int32_t page_size, const TopScores& top, ThreadPool& pool);

// The least and the greatest of a page's keys in each dimension. out: float32 of
// page_bounds_dims(), [2, pages, num_kv_heads, head_dim]: by page id up to the greatest listed one
// (zeros for pages that no sequence has), or of ragged keys every page_size tokens of each
// sequence.
EFFINFER_API Dims page_bounds_dims(const AttentionGeometry& geometry,
                                   const AttentionSequences& sequences);
EFFINFER_API void page_bounds(const AttentionGeometry& geometry,
                              const AttentionSequences& sequences, const StridedView& k,
                              KvOrder order, float* out, const Executor& executor);

// How high a logit of a page's keys may be at most, for any row of the sequence. out: float32 of
// page_scores_dims(), [num_qo_heads, sum of ceil(kv_len / page_size)].
EFFINFER_API Dims page_scores_dims(const AttentionGeometry& geometry,
                                   const AttentionSequences& sequences);
EFFINFER_API void page_scores(const AttentionGeometry& geometry,
                              const AttentionSequences& sequences, const StridedView& q,
                              const TensorView& bounds, float* out, const Executor& executor);

}  // namespace effinfer::ops
