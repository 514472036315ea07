// Which keys blocks of a prompt's rows visit by their hashes and by chance, and how often each of
// them counts (HyperAttention, Han et al., arXiv:2310.05869): a list for each block and KV head
// (ops/visits.h), with weights.
//
//   first pages | candidates: whole pages of keys before ...   | the nearest keys and the block's
//   all, once   | those of the buckets nearest to the block's  | all, once
//               | queries, up to `keys` of them, once; of the  |
//               | rest one drawn from each of `samples` runs,  |
//               | which counts as often as its run is long     |
//
// Keys, less the mean of the first candidates, and queries lie in the buckets of a few bits
// (ops/hash_tables.h). The paper sorts buckets by Hamming distance so that what is near has near
// places. Here a bucket's place is how many of the block's queries lie near it, where those that
// differ in a bit count a quarter of those that do not: 4^(bits - differing ones), summed up over
// the queries of all heads, is an integer and the same in any order.
//
// Runs are of the rest in its own order, and as equally long as they can be. Each key of a run is
// drawn with the same chance, so that over seeds the sums of exponentials and of values have the
// expectations of those over all keys. A draw depends on the seed, the layer, the KV head and the
// block's position.
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

inline constexpr int32_t kMostBucketBits = 8;
// As many hyperplanes are there whatever `bits` is.
inline constexpr HashShape kBucketPlanes = {1, kMostBucketBits, 1};
inline constexpr int64_t kBucketNearness = 4;
inline constexpr int64_t kMostMeanPages = 8;  // of the mean that keys lose

struct BucketIndexProblem {
  const float* q = nullptr;  // [T, num_qo_heads, head_dim], roped
  int64_t q_stride = 0;      // floats between rows
  int32_t num_qo_heads = 0;
  KvLayer kv;
  BatchLayout batch;
  VisitPlan visits;  // with weights
  int32_t bits = kMostBucketBits;
  int32_t keys = 0;
  int32_t samples = 0;  // 0: what is not near is left out
  int32_t sink_tokens = 0;
  int32_t local_tokens = 0;
  int32_t min_tokens = 0;  // blocks behind fewer keys visit all of them
  uint64_t seed = 0;
  int32_t layer = 0;
  const float* planes = nullptr;       // hash_planes() of kBucketPlanes
  const IndexedHead* heads = nullptr;  // [num_kv_heads]
  int32_t max_kv_len = 0;              // of any step, for the scratch
};

// Pages between the first ones and the nearest keys of a block's first row, which are full.
constexpr PageCandidates candidates_of(const BucketIndexProblem& p, const VisitBlock& block) {
  const int64_t local = int64_t{block.position} + 1 - p.local_tokens;
  const int64_t end = local < block.position ? local : block.position;
  const int64_t first = (p.sink_tokens + kPageSize - 1) / kPageSize;
  PageCandidates pages;
  pages.first = first > 1 ? first : 1;
  pages.end = end > 0 ? end / kPageSize : 0;
  return pages;
}
// Also where all candidates are to be visited.
constexpr bool visits_all(const BucketIndexProblem& p, const VisitBlock& block) {
  const int64_t candidates = candidates_of(p, block).count() * kPageSize;
  return block.position + block.num_rows < p.min_tokens ||
         candidates <= int64_t{p.keys} + p.samples;
}
// The first candidates, whose mean keys lose: all blocks with candidates that are not visited have
// as many.
constexpr int64_t mean_pages(const BucketIndexProblem& p) {
  const int64_t pages = (int64_t{p.keys} + p.samples) / kPageSize + 1;
  return pages < kMostMeanPages ? pages : kMostMeanPages;
}

// On a GPU, between its kernels: of a sequence's KV head the mean that keys lose, and the bucket of
// each of its candidates, a byte by token.
inline constexpr int64_t kMostBucketDims = 256;
constexpr int64_t bucket_bytes(int64_t list_words) {
  return kMostBucketDims * int64_t{sizeof(float)} + list_words * kPageSize;
}

std::string describe(const BucketIndexProblem& problem);
Cost cost(const BucketIndexProblem& problem);

}  // namespace effinfer::ops
