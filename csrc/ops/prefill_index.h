// Choosing the keys that blocks of query rows visit (ops/visits.h), from queries and keys of
// the step at hand. Both problems visit, whatever they choose, the first `sink_tokens` keys,
// the last `local_tokens` ones up to each row, and the keys at the block's own rows. A head of
// queries chooses for itself, and a list has what any head of its group chose; or, within a budget
// of pages, a group's heads choose together.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/top_scores.h"
#include "ops/cost.h"
#include "ops/kv_layout.h"
#include "ops/operand.h"
#include "ops/visits.h"

namespace effinfer::ops {

// What an index does with the lists of a KV head: nothing, as another index writes them; choose; or
// visit all keys.
enum class IndexedHead : uint8_t { other, chosen, dense };

struct PrefillIndexInputs {
  const float* q = nullptr;  // [T, num_qo_heads, head_dim], roped
  int64_t q_stride = 0;      // floats between rows
  int32_t num_qo_heads = 0;
  KvLayer kv;
  BatchLayout batch;
  VisitPlan visits;
  // bf16: queries are rounded to it; of bf16 pages.
  Arithmetic arithmetic = Arithmetic::f32;
  float sm_scale = 1.0f;
  int32_t sink_tokens = 0;
  int32_t local_tokens = 0;
  int32_t min_tokens = 0;  // a sequence of fewer keys visits all of them
  // What a product of choosing costs, in products of attention; 0: choosing need not pay.
  float product_cost = 0.0f;
  const IndexedHead* heads = nullptr;  // [num_kv_heads]
  int32_t max_kv_len = 0;              // of any step, for the scratch
};

// Columns and slashes: keys that get the most probability from some of the rows, summed over them,
// and distances between row and key that do. All blocks visit the columns, and the keys at a
// slash's distance of any of their rows (MInference's vertical-slash, arXiv:2407.02490,
// section 3.2; with rows in even strides and no slashes SampleAttention's columns,
// arXiv:2406.15486, section 4.2).
struct ColumnIndexProblem {
  PrefillIndexInputs in;
  int32_t last_rows = 64;  // rows that are asked: the last ones of a sequence in the step,
  int32_t row_stride = 0;  // or, when positive, the last one and every so many before it
  TopScores columns;
  TopScores slashes;
};

// Blocks of keys, a page each, other ones for each block of rows. A page's score is, with stride 0,
// the softmax over pages of its mean product (MInference's block-sparse pattern); with a positive
// one the softmax over cells of `stride` rows and keys, whose antidiagonals are summed, added up
// over the block's cells (XAttention, arXiv:2503.16428, section 2).
//
// With `probe` the mean query is a weighted one, in which tokens count by how far their queries lie
// from the block's mean: the squares of the distances over the variances of the dimensions, summed
// over the query heads of a KV head (ActQKV, arXiv:2502.13542). A block whose queries are all alike
// has their mean.
struct BlockIndexProblem {
  PrefillIndexInputs in;
  int32_t stride = 0;  // 0, 4, 8, 16, 32 or 64
  bool probe = false;  // with stride 0
  TopScores pages;
  // In place of `pages`, of a KV head: as many as hold so many keys, or which share of those that
  // are chosen from, whichever is more. Its heads' scores are added up.
  int32_t keys = 0;
  float share = 0.0f;

  constexpr bool has_budget() const { return keys > 0 || share > 0.0f; }
};

// What a budget is for: pages with keys between the whole pages of sink_tokens and the local ones.
constexpr PageCandidates candidates_of(const BlockIndexProblem& p, const VisitBlock& block) {
  const int64_t local = int64_t{block.position} + 1 - p.in.local_tokens;
  const int64_t behind = local < block.position ? local : block.position;
  const int64_t first = p.in.sink_tokens / kPageSize;
  const int64_t end = behind > 0 ? (behind + kPageSize - 1) / kPageSize : 0;
  return {first, end > first ? end : first};
}
constexpr int64_t chosen_pages(const BlockIndexProblem& p, int64_t pages) {
  return units_within(p.keys, p.share, kPageSize, pages);
}

// Choosing has to cost at most this share of what leaving keys out can save: the methods here leave
// out a third or more of what they may from 4,000 tokens on.
inline constexpr float kChoosingShare = 1.0f / 3.0f;

constexpr int64_t rows_of(const PrefillIndexInputs& in, int64_t sequence) {
  return in.batch.qo_indptr[sequence + 1] - in.batch.qo_indptr[sequence];
}

// Pairs of a row and a key that it sees.
constexpr int64_t seen_pairs(const PrefillIndexInputs& in, int64_t sequence) {
  const int64_t rows = rows_of(in, sequence);
  return rows * (in.batch.kv_len[sequence] - rows) + rows * (rows + 1) / 2;
}

constexpr bool chooses_any(const TopScores& top) {
  return top.count > 0 || top.mass > 0.0f;
}

// Products of rows with keys that choosing takes, of one head.
constexpr int64_t products(const ColumnIndexProblem& problem, int64_t sequence) {
  if (!chooses_any(problem.columns) && !chooses_any(problem.slashes)) return 0;
  // Maxima and sums first, then probabilities.
  if (problem.row_stride > 0) return 2 * seen_pairs(problem.in, sequence) / problem.row_stride;
  const int64_t rows = rows_of(problem.in, sequence);
  const int64_t asked = rows < problem.last_rows ? rows : problem.last_rows;
  return 2 * asked * problem.in.batch.kv_len[sequence];
}
constexpr int64_t products(const BlockIndexProblem& problem, int64_t sequence) {
  const int64_t stride = problem.stride > 0 ? problem.stride : kVisitBlockRows;
  return seen_pairs(problem.in, sequence) / stride;
}

// Attention takes two products of each pair.
constexpr bool pays(const PrefillIndexInputs& in, int64_t sequence, int64_t products) {
  const int64_t rows = rows_of(in, sequence);
  const int64_t always = int64_t{in.sink_tokens} + in.local_tokens + kVisitBlockRows / 2;
  const int64_t saved = seen_pairs(in, sequence) - rows * always;
  const int64_t most_saved = saved > 0 ? 2 * saved : 0;
  return in.product_cost * static_cast<float>(products) <=
         kChoosingShare * static_cast<float>(most_saved);
}

// Whether a sequence that has lists gets chosen ones in this step, or all keys. Counts alone
// decide: the same step chooses alike on every run.
template <class Problem>
constexpr bool chooses(const Problem& problem, int64_t sequence) {
  if (problem.in.batch.kv_len[sequence] < problem.in.min_tokens) return false;
  return problem.in.product_cost == 0.0f || pays(problem.in, sequence, products(problem, sequence));
}

std::string describe(const ColumnIndexProblem& problem);
std::string describe(const BlockIndexProblem& problem);
Cost cost(const ColumnIndexProblem& problem);
Cost cost(const BlockIndexProblem& problem);

}  // namespace effinfer::ops
