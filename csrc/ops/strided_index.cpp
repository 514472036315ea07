#include "ops/strided_index.h"

namespace effinfer::ops {

std::string describe(const StridedIndexProblem& p) {
  return "[strided_index] stride=" + std::to_string(p.stride) +
         " shift=" + std::to_string(p.shift) + " sink_tokens=" + std::to_string(p.sink_tokens) +
         " local_tokens=" + std::to_string(p.local_tokens) + "; all keys: rows of fewer than " +
         std::to_string(p.min_tokens) + " keys";
}

// It writes words, and reads no keys.
Cost cost(const StridedIndexProblem& p) {
  Cost cost;
  cost.bytes = (p.visits.num_blocks + p.visits.num_rows) * p.visits.num_kv_heads *
               p.visits.list_words * static_cast<int64_t>(sizeof(uint64_t));
  return cost;
}

}  // namespace effinfer::ops
