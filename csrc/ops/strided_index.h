// The keys that query rows visit by a fixed pattern, another one for each KV head (S2-Attention,
// Lin et al., arXiv:2407.17678): the nearest pages, and of those before them every `stride`-th one.
// Which ones is the head's: `stride` heads in a row visit all pages together. For blocks of rows of
// a prompt and for generated ones, as a page's number alone decides.
//
//   page             0    1    2    3    4    5    6    7    8    9      rows of page 9, stride 3,
//   head 0           x    .    .    x    .    .    x    .    x    x      one local page
//   head 1           .    x    .    .    x    .    .    x    x    x
//   head 2           .    .    x    .    .    x    .    .    x    x
#pragma once

#include <cstdint>
#include <string>

#include "ops/cost.h"
#include "ops/kv_layout.h"
#include "ops/prefill_index.h"
#include "ops/visits.h"

namespace effinfer::ops {

struct StridedIndexProblem {
  BatchLayout batch;
  VisitPlan visits;
  int32_t stride = 1;
  int32_t shift = 0;         // head h has the pages p with p % stride = (h + shift) % stride,
  int32_t sink_tokens = 0;   // all have the first keys,
  int32_t local_tokens = 0;  // the pages of so many keys before a row's own, at least one,
  int32_t min_tokens = 0;    // and rows behind fewer keys all of them
  const IndexedHead* heads = nullptr;  // [num_kv_heads]
};

// Keys before a row's own page that it visits.
constexpr int64_t local_pages(const StridedIndexProblem& p) {
  return p.local_tokens > kPageSize ? (p.local_tokens + kPageSize - 1) / kPageSize : 1;
}

std::string describe(const StridedIndexProblem& problem);
Cost cost(const StridedIndexProblem& problem);

}  // namespace effinfer::ops
