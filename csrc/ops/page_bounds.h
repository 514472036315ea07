// What the keys of pages are bounded by, and how high logits may be within the bounds (Quest, Tang
// et al., arXiv:2406.10774, section 3.3).
#pragma once

#include <cstdint>
#include <string>

#include "ops/attention.h"
#include "ops/cost.h"

namespace effinfer::ops {

struct KeyPage {
  const uint8_t* first;  // row of its first token, in the first head; null where none is read
  int64_t tokens;
  int64_t place;  // in the bounds
  int64_t sequence;
};

// The least and the greatest of each page's keys, in each dimension; a page is one chunk.
struct PageBoundsProblem {
  const KeyPage* pages = nullptr;
  int64_t num_pages = 0;
  KvRows k;  // f32, f16 or bf16
  int32_t num_kv_heads = 0;
  float* least = nullptr;  // [places, num_kv_heads, dims]
  float* most = nullptr;
};

// For each query head and page the greatest, over a sequence's rows, of the sum over dimensions of
// the higher of the products with the page's least and its most.
struct PageScoresProblem {
  QueryRows q;
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int64_t num_sequences = 0;
  const int32_t* qo_indptr = nullptr;  // [num_sequences + 1]
  const int64_t* starts = nullptr;     // [num_sequences + 1] into `pages`
  const KeyPage* pages = nullptr;
  int64_t num_pages = 0;
  const float* least = nullptr;  // as above
  const float* most = nullptr;
  float* out = nullptr;  // [num_qo_heads, pages]
};

std::string describe(const PageBoundsProblem& problem);
std::string describe(const PageScoresProblem& problem);
const char* rejects(const PageBoundsProblem& problem);
Cost cost(const PageBoundsProblem& problem);
Cost cost(const PageScoresProblem& problem);

}  // namespace effinfer::ops
