// Sparse attention over the engine's pages: lists of the keys that blocks of query rows visit, the
// methods that choose them, and attention that walks them (paged_attention's `visits`).
//
// A sequence with 64 rows or more in a call has lists, one for each block of its rows and KV head.
// Others are generated tokens, and either visit all keys or have a list for each row and KV head. A
// list has a bit for each token of the sequence. Whatever a method chooses, a block visits the
// first `sink_tokens` keys, the last `local_tokens` ones up to each row, and its own rows'.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "effinfer/dtype.h"
#include "effinfer/export.h"
#include "effinfer/ops/paged_kv.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"
#include "effinfer/top_scores.h"

namespace effinfer::ops {

class EFFINFER_API Visits {
 public:
  // Lists of a batch's blocks, empty at first; of generated rows, too, when these shall have some.
  // `weighted`: each of them also says how often its keys count, once at first. Of `batch` only
  // qo_indptr and kv_len are read. Throws InvalidArgument, OutOfMemory.
  Visits(const PagedBatch& batch, int32_t num_qo_heads, int32_t num_kv_heads,
         bool generated = false, bool weighted = false);
  ~Visits();
  Visits(Visits&&) noexcept;
  Visits& operator=(Visits&&) noexcept;

  // Blocks, and behind them generated rows: sequence, first row (flat), rows, position of the first
  // row; int32 [B, 4].
  std::vector<int32_t> blocks() const;
  int64_t num_blocks() const;
  int32_t num_kv_heads() const;
  int64_t list_words() const;
  // [B, num_kv_heads, list_words]: bit t % 64 of word t / 64 is token t.
  uint64_t* words();
  // [B, num_kv_heads, 64 * list_words]: by token the natural logarithm of how often it counts,
  // which attention adds to its logits. Null: each counts once.
  float* log_weights();

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

struct VisitOptions {
  float sm_scale = 1.0f;
  int32_t sink_tokens = 0;
  int32_t local_tokens = 0;
  int32_t min_tokens = 0;  // a sequence of fewer keys visits all of them
  // Of the scores: f32, or bf16, for which queries are rounded to bfloat16 and multiplied as such
  // with bf16 pages where the CPU has AVX512-BF16 (Unsupported elsewhere).
  DType arithmetic = DType::f32;
};

// Keys and distances between row and key that get the most probability from some rows of a
// sequence: MInference's vertical-slash (Jiang et al., arXiv:2407.02490, section 3.2 and algorithm
// 2); with a row_stride and no slashes SampleAttention (Zhu et al., arXiv:2406.15486, section 4.2);
// with neither columns nor slashes A-shape.
struct ColumnVisits {
  int32_t last_rows = 64;  // the rows: the last ones,
  int32_t row_stride = 0;  // or, when positive, the last one and every so many before it
  TopScores columns;
  TopScores slashes;
};
// Each query head of q [T, num_qo_heads, head_dim] chooses; a list has what any head of its KV head
// chose. Throws InvalidArgument.
EFFINFER_API void column_visits(Visits& visits, const TensorView& q, const PagedKv& kv,
                                const PagedBatch& batch, const ColumnVisits& columns,
                                const VisitOptions& options, ThreadPool& pool);

// Pages of 64 keys for each block of rows, by the softmax over pages of a head's mean products
// (stride 0: MInference's block-sparse pattern), or over cells of `stride` rows and keys, 4 to 64
// and a power of two, of the sums on their antidiagonals, added up over the block's cells
// (XAttention, Xu et al., arXiv:2503.16428, section 2). With a probe query (stride 0) a head's
// products are those of the weighted mean of its queries, in which a token counts by its squared
// distance from the block's mean, over the variances of the dimensions of its KV head's queries
// (ActQKV, Xiao et al., arXiv:2502.13542).
//
// Each head chooses `pages`, and a list has all of these; or a KV head has a budget, for which its
// query heads' scores are added up.
struct BlockVisits {
  int32_t stride = 0;
  TopScores pages;
  bool probe = false;
  // In place of pages: as many as hold `keys`, or `share` of the pages (rounded up), whichever is
  // more, of those behind whole ones of sink_tokens and before local_tokens.
  int32_t keys = 0;
  float share = 0.0f;
};
EFFINFER_API void block_visits(Visits& visits, const TensorView& q, const PagedKv& kv,
                               const PagedBatch& batch, const BlockVisits& blocks,
                               const VisitOptions& options, ThreadPool& pool);

// What the query heads of a KV head, which have one list, make of their scores: after the softmax
// of each over what is chosen from the highest, or the sum.
enum class HeadVote : uint8_t { highest, sum };

// What a generated row visits: its own page and the one before it, the pages of whole
// `sink_tokens` and of whole `local_tokens`, and of those between them the units with the highest
// scores: as many as hold `keys`, or `share` of the units (rounded up), whichever is more. A row at
// a position below min_tokens - 1 visits all keys.
struct RowChoice {
  int32_t keys = 0;
  float share = 0.0f;
  HeadVote vote = HeadVote::highest;
  // At least 0: of attention that sees so many keys before the row. It chooses from pages that lie
  // within these, all of which count where fewer than min_tokens do, and visits those that it sees
  // of the page before.
  int32_t window_left = -1;
};

// Units of 16, 32 or 64 keys, by how high their logits may be: the sum over dimensions of the
// higher of the products with the least and the greatest of the unit's keys, as bf16 bounds them
// (Quest, Tang et al., arXiv:2406.10774, section 3.3).
//
// With means units of 16 by their mean keys, in bf16 (as Squeezed Attention, Hooper et al.,
// arXiv:2411.09688, compares centroids), or pages of 64 by those of windows (InfLLM v2, of
// MiniCPM4, arXiv:2506.07900):
// windows of 32 keys begin at each 16th one, as far as they lie within what is chosen from. The
// heads' softmaxes are over windows, and a page has the highest of the windows that it shares keys
// with.
struct PageVisits {
  RowChoice choice;
  int32_t unit = 64;
  bool means = false;  // of unit 16 or 64
};
// Throws InvalidArgument, also for an arithmetic other than f32.
EFFINFER_API void page_visits(Visits& visits, const TensorView& q, const PagedKv& kv,
                              const PagedBatch& batch, const PageVisits& pages,
                              const VisitOptions& options, ThreadPool& pool);

// Single keys, by their logits, or by what some channels of the keys add to these.
struct KeyVisits {
  RowChoice choice;
  TensorView channels;  // int32 [num_kv_heads, n], ascending; rank 0: all
};
// Throws as page_visits().
EFFINFER_API void key_visits(Visits& visits, const TensorView& q, const PagedKv& kv,
                             const PagedBatch& batch, const KeyVisits& tokens,
                             const VisitOptions& options, ThreadPool& pool);

// Single keys that are drawn, and how often each of them counts, for lists with weights (MagicPIG,
// Chen et al., arXiv:2410.16179): those that collide with a query head in two or more of this
// head's tables of random hyperplanes. A key with the probability u of that counts 1 / u times,
// what a row visits in any case once: over seeds attention's sums have the expectations of those
// over all keys. Rows that visit all keys have no weights.
struct HashVisits {
  int32_t bits = 8;     // of a table, 1 to 8
  int32_t tables = 40;  // of each query head, a multiple of 8 up to 256
  uint64_t seed = 0;
  TensorView means;  // f32 [num_kv_heads, head_dim], subtracted from keys; rank 0: zeros
};
// Throws InvalidArgument. The options' sm_scale and arithmetic are not asked.
EFFINFER_API void hash_visits(Visits& visits, const TensorView& q, const PagedKv& kv,
                              const PagedBatch& batch, const HashVisits& hashes,
                              const VisitOptions& options, ThreadPool& pool);

}  // namespace effinfer::ops
