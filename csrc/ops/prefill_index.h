// Choosing the keys that blocks of query rows visit (ops/visits.h), from queries and keys of
// the step at hand. Both problems visit, whatever they choose, the first `sink_tokens` keys,
// the last `local_tokens` ones up to each row, and the keys at the block's own rows. A head of
// queries chooses for itself; a list has what any head of its group chose.
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
struct BlockIndexProblem {
  PrefillIndexInputs in;
  int32_t stride = 0;  // 0, 4, 8, 16, 32 or 64
  TopScores pages;
};

// Choosing has to cost at most this share of what leaving keys out can save: the methods here leave
// out a third or more of what they may from 4,000 tokens on.
inline constexpr float kChoosingShare = 1.0f / 3.0f;

// Whether a sequence that has lists gets chosen ones in this step, or all keys. Counts alone
// decide: the same step chooses alike on every run.
bool chooses(const ColumnIndexProblem& problem, int64_t sequence);
bool chooses(const BlockIndexProblem& problem, int64_t sequence);

std::string describe(const ColumnIndexProblem& problem);
std::string describe(const BlockIndexProblem& problem);
Cost cost(const ColumnIndexProblem& problem);
Cost cost(const BlockIndexProblem& problem);

}  // namespace effinfer::ops
