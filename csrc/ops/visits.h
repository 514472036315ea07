// Which keys query rows visit in a step: sparse attention over the engine's pages.
//
// A list is for one block of rows of one sequence and one KV head, and has a 64-bit word for each
// page of the sequence: a bit for each of its tokens that the block's rows visit. Index kernels
// (ops/prefill_index.h, ops/page_index.h) write the words, attention skips the pages whose word is
// 0. Unlike spans, words have a size that is known beforehand, so that nothing allocates within a
// step.
//
//   sequence       rows of this step            lists, one for each KV head
//   0 (700 rows)   a prompt                     of [0, 64) [64, 128) ... [640, 700)
//   1 (1 row)      a generated token            of the row
//   2 (5 rows)     that and drafts, or tokens   of each row, which may be a tree's: a draft is
//                  that are fed again           verified with the keys that its token visits alone
//
// Lists of rows follow those of blocks. A shape has the one kind, the other, or both; rows of the
// kind that it has not, and sequences that the batch calls dense, see all keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "effinfer/ops/visits.h"
#include "ops/kv_layout.h"

namespace effinfer::ops {

// Fewer rows of a sequence in a step are generated tokens. Of a prompt choosing keys for them would
// cost as much as visiting them.
inline constexpr int32_t kSparseRows = 64;
// Rows of a block; a sequence's last one may have fewer. As many as keys of a page, so that blocks
// and pages lie alike in a sequence whose steps begin at a page's first token.
inline constexpr int32_t kVisitBlockRows = 64;

struct VisitBlock {
  int32_t sequence;
  int32_t first_row;  // flat
  int32_t num_rows;
  int32_t position;  // of the first row; of a tree's row that of its depth
};

// A sequence that has lists.
struct VisitSequence {
  int32_t sequence;
  int32_t first_block;
  int32_t num_blocks;
};

// Of a sequence with lists: whether each row has its own.
constexpr bool has_row_lists(const BatchLayout& batch, int64_t sequence) {
  const int32_t rows = batch.qo_indptr[sequence + 1] - batch.qo_indptr[sequence];
  return rows < kSparseRows || batch.is_tree(sequence);
}

struct VisitPlan {
  const VisitBlock* blocks = nullptr;
  int64_t num_blocks = 0;
  int64_t num_rows = 0;  // blocks of one generated row each, behind these
  const VisitSequence* sequences = nullptr;
  int64_t num_sequences = 0;
  const int32_t* first_block = nullptr;  // [S of the batch]: -1 without lists
  int32_t num_kv_heads = 0;
  int32_t num_qo_heads = 0;
  int64_t list_words = 0;
  uint64_t* words = nullptr;  // [num_blocks + num_rows][num_kv_heads][list_words]
  uint64_t* chosen =
      nullptr;              // [num_sequences][num_qo_heads][2][list_words]: between index kernels
  int32_t* done = nullptr;  // [num_sequences][num_kv_heads], zeros between calls
  // Of GPUs, between kernels that choose columns (ops/column_scratch.h), for as many sequences.
  std::byte* scores = nullptr;
  int64_t score_sequences = 0;

  constexpr uint64_t* list(int64_t block, int64_t kv_head) const {
    return words + (block * num_kv_heads + kv_head) * list_words;
  }
  constexpr bool has_lists() const { return num_blocks + num_rows > 0; }
  // Of the rows from `row` on, which lie in one block; null: all keys.
  constexpr const uint64_t* of_rows(const BatchLayout& batch, int64_t sequence, int64_t row,
                                    int64_t kv_head) const {
    if (!has_lists() || first_block[sequence] < 0) return nullptr;
    const int64_t first = batch.qo_indptr[sequence];
    const int32_t rows = has_row_lists(batch, sequence) ? 1 : kVisitBlockRows;
    return list(first_block[sequence] + (row - first) / rows, kv_head);
  }
};

struct VisitShape {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  bool blocks = true;    // rows of prompts have lists
  bool rows = false;     // generated rows have
  bool columns = false;  // some index chooses columns

  constexpr bool same_lists(const VisitShape& other) const {
    return num_qo_heads == other.num_qo_heads && num_kv_heads == other.num_kv_heads &&
           blocks == other.blocks && rows == other.rows;
  }
};

// The memory of the lists of any step within limits.
class VisitBuffers {
 public:
  VisitBuffers() = default;
  VisitBuffers(const VisitShape& shape, int64_t max_tokens, int64_t max_sequences,
               int64_t max_kv_len);

  // The plan of a batch; no allocation. Good until the next one.
  VisitPlan plan(const BatchLayout& batch);
  // The counts of the largest plan.
  VisitPlan largest() const;

 private:
  void add_blocks(const BatchLayout& batch, VisitPlan& plan);
  void add_rows(const BatchLayout& batch, VisitPlan& plan);

  VisitShape shape_;
  int64_t list_words_ = 0;
  int64_t max_blocks_ = 0;  // those behind are of rows
  std::vector<VisitBlock> blocks_;
  std::vector<VisitSequence> sequences_;
  std::vector<int32_t> first_block_;
  std::vector<uint64_t> words_;
  std::vector<uint64_t> chosen_;
  std::vector<int32_t> done_;
};

// The lists of an operator's call. Throws InvalidArgument when the batch or the heads are others
// than they are of.
const VisitPlan& plan_of(const Visits& visits, std::string_view op, const BatchLayout& batch,
                         int32_t num_qo_heads, int32_t num_kv_heads);

}  // namespace effinfer::ops
