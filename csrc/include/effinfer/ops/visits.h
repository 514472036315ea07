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
  // Of `batch` only qo_indptr and kv_len are read. Throws InvalidArgument, OutOfMemory.
  Visits(const PagedBatch& batch, int32_t num_qo_heads, int32_t num_kv_heads,
         bool generated = false);
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
// (XAttention, Xu et al., arXiv:2503.16428, section 2).
struct BlockVisits {
  int32_t stride = 0;
  TopScores pages;
};
EFFINFER_API void block_visits(Visits& visits, const TensorView& q, const PagedKv& kv,
                               const PagedBatch& batch, const BlockVisits& blocks,
                               const VisitOptions& options, ThreadPool& pool);

// Pages for each generated row, by how high the logits of their keys may be: the sum over
// dimensions of the higher of the products with the least and the greatest of the page's keys, as
// bf16 bounds them (Quest, Tang et al., arXiv:2406.10774, section 3.3). A page's score is the
// highest of the group's heads, each less the logarithm of its exponentials' sum over the pages: of
// as much use to one head as to another. A row visits its own page and the one before it; the
// others behind the whole pages of `sink_tokens` are chosen from: as many as `pages`, or `share` of
// them (rounded up), whichever is more. A row at a position below min_tokens - 1 visits all keys.
struct PageVisits {
  int32_t pages = 0;
  float share = 0.0f;
};
// Throws InvalidArgument, also for an arithmetic other than f32.
EFFINFER_API void page_visits(Visits& visits, const TensorView& q, const PagedKv& kv,
                              const PagedBatch& batch, const PageVisits& pages,
                              const VisitOptions& options, ThreadPool& pool);

}  // namespace effinfer::ops
