// Lists of the tokens that blocks of query rows visit, for a batch of a caller's: chosen by scores
// that are there already, as spans that attention over lists walks (ops/attention.h). The methods
// are those of the engine's index kernels (cpu/choose_tokens.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "effinfer/top_scores.h"
#include "ops/attention_scores.h"
#include "ops/visits.h"

namespace effinfer::ops {

// The lists of one sequence and KV head, a block of rows after the other. How many spans there are
// is known when they are made only.
struct ListSpans {
  std::vector<int32_t> spans;   // [begin, end) of each
  std::vector<int32_t> counts;  // of spans, for each block
};

// The rows of a batch, a sequence's last tokens each, in blocks: those whose positions have the
// same quotient by block_size. A sequence and KV head is one chunk.
struct TokenListInputs {
  int64_t num_sequences = 0;
  int32_t num_kv_heads = 0;
  const int32_t* qo_indptr = nullptr;  // [S + 1]
  const int32_t* kv_len = nullptr;     // [S]
  int32_t max_kv_len = 0;
  int32_t block_size = 0;
  bool causal = false;
  int32_t sink_tokens = 0;
  int32_t local_tokens = 0;
  ListSpans* out = nullptr;  // [S][num_kv_heads]

  int64_t position(int64_t s) const {  // of the first row
    return int64_t{kv_len[s]} - (qo_indptr[s + 1] - qo_indptr[s]);
  }
  // Tokens before it are all that a row of the block sees.
  int64_t limit(const VisitBlock& block) const {
    return causal ? int64_t{block.position} + block.num_rows : kv_len[block.sequence];
  }
};

// visit(block) for each of a sequence.
template <class Visit>
void for_row_blocks(const TokenListInputs& in, int64_t s, Visit&& visit) {
  const int32_t end = in.qo_indptr[s + 1];
  const int32_t shift = in.kv_len[s] - end;  // from a row to its position
  for (int32_t row = in.qo_indptr[s]; row < end;) {
    const int64_t index = (row + shift) / in.block_size;
    const int64_t next = (index + 1) * in.block_size - shift;
    const auto count = static_cast<int32_t>(std::min<int64_t>(next, end)) - row;
    visit(VisitBlock{static_cast<int32_t>(s), row, count, row + shift});
    row += count;
  }
}

// Scores [num_kv_heads * group][starts[S]] of all sequences' keys, or pages; sequence s has those
// from starts[s] on.
struct HeadScores {
  const float* data = nullptr;
  const int64_t* starts = nullptr;
  int64_t head_stride = 0;
  int32_t group = 0;  // heads that choose for one KV head; 0: none

  const float* of(int64_t s, int64_t kv_head, int64_t head) const {
    return data + (kv_head * group + head) * head_stride + starts[s];
  }
  int64_t count(int64_t s) const { return starts[s + 1] - starts[s]; }
};

// Keys, and keys at some distances behind each row; without columns A-shape.
struct ColumnListsProblem {
  TokenListInputs in;
  HeadScores columns;
  HeadScores slashes;
  TopScores top_columns;
  TopScores top_slashes;
};

// Blocks of in.block_size keys, other ones for each block of rows.
struct BlockListsProblem {
  TokenListInputs in;
  const float* scores = nullptr;    // of (head, block of rows, block of keys)
  const ScoreRows* rows = nullptr;  // [S]
  int32_t group = 0;
  TopScores top;
};

// Pages of page_size keys, the same for all rows, by the highest score of any head of the group.
struct PageListsProblem {
  TokenListInputs in;
  HeadScores scores;
  int32_t page_size = 0;
  TopScores top;
};

std::string describe(const ColumnListsProblem& problem);
std::string describe(const BlockListsProblem& problem);
std::string describe(const PageListsProblem& problem);
// Sets of a sequence's tokens, and the order of as many scores.
size_t scratch_bytes(const ColumnListsProblem& problem);
size_t scratch_bytes(const BlockListsProblem& problem);
size_t scratch_bytes(const PageListsProblem& problem);

}  // namespace effinfer::ops
