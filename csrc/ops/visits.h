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
// An index that draws its keys also says how often each counts (`log_weights`), so that what it
// drew stands for what it did not: attention adds the logarithm to the key's logit.
//
// Lists of rows follow those of blocks. A shape has the one kind, the other, or both; rows of the
// kind that it has not, and sequences that the batch calls dense, see all keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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

// The pages [first, end) that a row or a block chooses from.
struct PageCandidates {
  int64_t first;
  int64_t end;

  constexpr int64_t count() const { return end - first; }
};
// Of `units` of `unit` keys: how many hold `keys`, or a share of them, rounded up, whichever is
// more.
constexpr int64_t units_within(int32_t keys, float share, int64_t unit, int64_t units) {
  const float part = share * static_cast<float>(units);
  const auto whole = static_cast<int64_t>(part);
  const int64_t rounded = part > static_cast<float>(whole) ? whole + 1 : whole;
  const int64_t wanted = keys / unit > rounded ? keys / unit : rounded;
  return wanted < units ? wanted : units;
}

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
      nullptr;  // [num_sequences][num_qo_heads][2][list_words]: between index kernels
  // Null, or by slot the natural logarithm of how often a visited key counts, which may be anything
  // for keys that are not visited: [num_blocks + num_rows][num_kv_heads][kPageSize * list_words];
  float* log_weights = nullptr;
  uint8_t* weighted = nullptr;  // and which lists have them: [num_blocks + num_rows][num_kv_heads]
  bool weighs_blocks = false;   // whether it says so of lists of that kind
  bool weighs_rows = false;
  int32_t* done = nullptr;  // [num_sequences][num_kv_heads], zeros between calls
  // Of GPUs, between kernels that choose columns (ops/column_scratch.h), for as many sequences.
  std::byte* scores = nullptr;
  int64_t score_sequences = 0;
  // Likewise, of units that generated rows choose from (ops/row_scores.h), for as many rows.
  float* row_scores = nullptr;
  int64_t score_rows = 0;
  // Likewise, of keys that lie in buckets (ops/bucket_index.h): bucket_bytes() of each sequence's
  // KV head.
  std::byte* buckets = nullptr;

  constexpr uint64_t* list(int64_t block, int64_t kv_head) const {
    return words + (block * num_kv_heads + kv_head) * list_words;
  }
  constexpr float* list_weights(int64_t block, int64_t kv_head) const {
    return log_weights + (block * num_kv_heads + kv_head) * list_words * kPageSize;
  }
  constexpr bool has_lists() const { return num_blocks + num_rows > 0; }
  constexpr bool has_weights() const { return weighs_blocks || weighs_rows; }
  // Of the rows from `row` on, which lie in one block; null: all keys.
  constexpr const uint64_t* of_rows(const BatchLayout& batch, int64_t sequence, int64_t row,
                                    int64_t kv_head) const {
    const int64_t block = block_of(batch, sequence, row);
    return block < 0 ? nullptr : list(block, kv_head);
  }
  // Of the same; null: each key counts once.
  constexpr const float* weights_of_rows(const BatchLayout& batch, int64_t sequence, int64_t row,
                                         int64_t kv_head) const {
    const int64_t block = has_weights() ? block_of(batch, sequence, row) : -1;
    if (block < 0 || !(block < num_blocks ? weighs_blocks : weighs_rows)) return nullptr;
    if (weighted[block * num_kv_heads + kv_head] == 0) return nullptr;
    return list_weights(block, kv_head);
  }

 private:
  // -1: the rows have no list.
  constexpr int64_t block_of(const BatchLayout& batch, int64_t sequence, int64_t row) const {
    if (!has_lists() || first_block[sequence] < 0) return -1;
    const int32_t rows = has_row_lists(batch, sequence) ? 1 : kVisitBlockRows;
    return first_block[sequence] + (row - batch.qo_indptr[sequence]) / rows;
  }
};

struct VisitShape {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  bool blocks = true;    // rows of prompts have lists
  bool rows = false;     // generated rows have
  bool columns = false;  // some index chooses columns
  bool buckets = false;  // some index has keys in buckets
  // Of a page: the most scores that an index of generated rows chooses by.
  int32_t page_scores = 0;
  // Some index says how often keys of lists of that kind count.
  bool block_weights = false;
  bool row_weights = false;

  constexpr bool weights() const { return block_weights || row_weights; }

  constexpr bool same_lists(const VisitShape& other) const {
    return num_qo_heads == other.num_qo_heads && num_kv_heads == other.num_kv_heads &&
           blocks == other.blocks && rows == other.rows && block_weights == other.block_weights &&
           row_weights == other.row_weights;
  }
};

// The memory of the lists of any step within limits. That of weights is as much as 32 times that of
// the words, but takes none before it is written.
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
  void reserve_weights(int64_t lists);

  VisitShape shape_;
  int64_t list_words_ = 0;
  int64_t max_blocks_ = 0;  // those behind are of rows
  std::vector<VisitBlock> blocks_;
  std::vector<VisitSequence> sequences_;
  std::vector<int32_t> first_block_;
  std::vector<uint64_t> words_;
  std::vector<uint64_t> chosen_;
  std::vector<int32_t> done_;
  std::shared_ptr<float> log_weights_;
  std::vector<uint8_t> weighted_;
};

class Validator;
// How many keys are visited in any case, and from how many on a method chooses: none is negative.
void check_counts(const Validator& check, const VisitOptions& options);

// The lists of an operator's call. Throws InvalidArgument when the batch or the heads are others
// than they are of.
const VisitPlan& plan_of(const Visits& visits, std::string_view op, const BatchLayout& batch,
                         int32_t num_qo_heads, int32_t num_kv_heads);

}  // namespace effinfer::ops
