#include <algorithm>

#include "cuda/bodies/bucket_index.h"
#include "cuda/bodies/bucket_keys.h"
#include "cuda/entry.h"
#include "cuda/index_launch.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::BucketIndexProblem;

const char* rejects(const BucketIndexProblem& p) {
  static_assert(TiledQueries::kMostHeads * ops::kVisitBlockRows <=
                    BucketIndexKernel::kMostQueries &&
                TiledQueries::kMostDims <= ops::kMostBucketDims);
  return rejects_page_keys(p.kv, p.num_qo_heads / p.kv.num_kv_heads);
}

size_t shared_bytes(const BucketIndexProblem&) {
  return std::max(sizeof(BucketKeysKernel::Shared), sizeof(BucketIndexKernel::Shared));
}

void bucket_index(const BucketIndexProblem& p, Queue& queue) {
  const int64_t heads = p.visits.num_sequences * p.kv.num_kv_heads;
  BucketIndexParams params = {p, static_cast<int64_t>(p.kv.head_bytes()), 1};
  launch<BucketMeanKernel>(params, heads, queue);
  params.parts = static_cast<int32_t>(blocks_for(p.visits.list_words, BucketKeysKernel::kPages));
  launch<BucketKeysKernel>(params, heads * params.parts, queue);
  launch<BucketIndexKernel>(params, p.visits.num_blocks * p.kv.num_kv_heads, queue);
}

}  // namespace

void register_bucket_index() {
  add<BucketIndexProblem>("bucket_index", rejects, bucket_index, shared_bytes);
}

}  // namespace effinfer::cuda
