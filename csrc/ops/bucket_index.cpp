#include "ops/bucket_index.h"

namespace effinfer::ops {

std::string describe(const BucketIndexProblem& p) {
  return "[bucket_index] bits=" + std::to_string(p.bits) + " keys=" + std::to_string(p.keys) +
         " samples=" + std::to_string(p.samples) + " heads=" + std::to_string(p.num_qo_heads) +
         " kv_heads=" + std::to_string(p.kv.num_kv_heads) +
         " head_dim=" + std::to_string(p.kv.head_dim) +
         " kv_dtype=" + std::string(name(p.kv.dtype)) +
         " sink_tokens=" + std::to_string(p.sink_tokens) +
         " local_tokens=" + std::to_string(p.local_tokens) + "; all keys: fewer than " +
         std::to_string(kSparseRows) + " rows, or blocks behind fewer than " +
         std::to_string(p.min_tokens) + " keys";
}

// Keys are hashed once for several blocks, as if for all; queries once.
Cost cost(const BucketIndexProblem& p) {
  Cost cost;
  int64_t hashed = 0;
  for (int64_t i = 0; i < p.visits.num_sequences; ++i) {
    const VisitSequence& sequence = p.visits.sequences[i];
    const VisitBlock& last = p.visits.blocks[sequence.first_block + sequence.num_blocks - 1];
    if (visits_all(p, last)) continue;
    const int64_t keys = candidates_of(p, last).count() * kPageSize * p.kv.num_kv_heads;
    const int64_t rows = last.first_row + last.num_rows - p.batch.qo_indptr[sequence.sequence];
    cost.bytes += keys / kPageSize * static_cast<int64_t>(p.kv.head_bytes());
    hashed += keys + rows * p.num_qo_heads;
  }
  cost.ops = 2 * hashed * kBucketPlanes.planes() * p.kv.head_dim;
  return cost;
}

}  // namespace effinfer::ops
