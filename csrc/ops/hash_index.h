// Which keys a generated row draws, and how often each of them counts (MagicPIG, Chen et al.,
// arXiv:2410.16179): a list for each row and KV head, as page_index writes them (ops/page_index.h),
// with weights (ops/visits.h).
//
// The keys of full pages are hashed once, less a constant mean, in tables of each query head
// (ops/hash_tables.h). A row draws the keys that collide with one of its query heads in two tables
// of that head or more. The heads' tables have no hyperplane in common, so that a key whose chance
// is u(h) with head h is on the list with probability
//
//   u = 1 - (1 - u(1)) (1 - u(2)) ...
//
// and counts 1 / u times: over hyperplanes, the sums of exponentials and of values that it stands
// for have the expectations of those over all keys, for each of the heads.
//
// The first keys and the newest pages are visited in any case and count once.
#pragma once

#include <cstdint>
#include <string>

#include "ops/cost.h"
#include "ops/hash_tables.h"
#include "ops/kv_layout.h"
#include "ops/page_index.h"
#include "ops/prefill_index.h"
#include "ops/visits.h"

namespace effinfer::ops {

struct HashIndexProblem {
  const float* q = nullptr;  // [T, num_qo_heads, head_dim], roped
  int64_t q_stride = 0;      // floats between rows
  int32_t num_qo_heads = 0;
  KvLayer kv;  // without codes of its pages they are made each time
  BatchLayout batch;
  VisitPlan visits;  // with weights
  int32_t sink_tokens = 0;
  int32_t local_tokens = 0;
  int32_t min_tokens = 0;
  HashShape tables;
  const float* planes = nullptr;       // hash_planes()
  const float* chances = nullptr;      // hash_chances()
  const float* means = nullptr;        // [num_kv_heads, head_dim], subtracted from keys
  const IndexedHead* heads = nullptr;  // [num_kv_heads]
};

constexpr PageCandidates candidates_of(const HashIndexProblem& p, const VisitBlock& row) {
  return candidates_of(p.sink_tokens, p.local_tokens, row);
}
constexpr bool visits_all(const HashIndexProblem& p, const VisitBlock& row) {
  return row.position + 1 < p.min_tokens || candidates_of(p, row).count() == 0;
}

std::string describe(const HashIndexProblem& problem);
Cost cost(const HashIndexProblem& problem);

}  // namespace effinfer::ops
