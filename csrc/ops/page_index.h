// Choosing the pages that generated rows visit (ops/visits.h), by what their keys are bounded by
// (Quest, Tang et al., arXiv:2406.10774, section 3.3; effinfer/ops/visits.h has the rule).
//
// A row at a position of page o:
//
//   page     0 ... sinks     ...              o - 2    o - 1     o
//            visited         chosen from               visited   visited, up to the row
//
// Tokens of one step are 64 at most, so what is chosen from was there before the step, whichever
// of its rows asks: a row chooses alike alone, as a draft, and fed again behind others. A row of a
// tree visits all pages that the tree lies in, as its path's products are summed in an order of
// their own.
#pragma once

#include <cstdint>
#include <string>

#include "ops/cost.h"
#include "ops/kv_layout.h"
#include "ops/prefill_index.h"
#include "ops/visits.h"

namespace effinfer::ops {

struct PageIndexProblem {
  const float* q = nullptr;  // [T, num_qo_heads, head_dim], roped
  int64_t q_stride = 0;      // floats between rows
  int32_t num_qo_heads = 0;
  KvLayer kv;  // without bounds of its pages they are made each time
  BatchLayout batch;
  VisitPlan visits;
  float sm_scale = 1.0f;
  int32_t sink_tokens = 0;
  int32_t local_tokens = 0;
  int32_t min_tokens = 0;
  int32_t pages = 0;
  float share = 0.0f;
  const IndexedHead* heads = nullptr;  // [num_kv_heads]
  int32_t max_kv_len = 0;              // of any step, for the scratch

  constexpr int32_t group() const { return num_qo_heads / kv.num_kv_heads; }
};

// The pages [first, end) that a row chooses from.
struct PageCandidates {
  int64_t first;
  int64_t end;

  constexpr int64_t count() const { return end - first; }
};
constexpr PageCandidates candidates_of(const PageIndexProblem& p, const VisitBlock& row) {
  const int64_t first = p.sink_tokens / kPageSize;
  const int64_t end = row.position / kPageSize - 1;
  return {first, end > first ? end : first};
}
// How many of them it visits.
constexpr int64_t chosen_pages(const PageIndexProblem& p, int64_t candidates) {
  const float share = p.share * static_cast<float>(candidates);
  const auto whole = static_cast<int64_t>(share);
  const int64_t rounded = share > static_cast<float>(whole) ? whole + 1 : whole;
  const int64_t wanted = p.pages > rounded ? p.pages : rounded;
  return wanted < candidates ? wanted : candidates;
}
constexpr bool visits_all(const PageIndexProblem& p, const VisitBlock& row) {
  const int64_t candidates = candidates_of(p, row).count();
  return row.position + 1 < p.min_tokens || chosen_pages(p, candidates) == candidates;
}

std::string describe(const PageIndexProblem& problem);
Cost cost(const PageIndexProblem& problem);

}  // namespace effinfer::ops
