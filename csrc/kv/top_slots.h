// Which slots to keep by score, for KvCache::retain.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace effinfer::kv {

// Slots that are kept whatever their score.
struct Protected {
  int64_t first = 0;  // of the sequence's first ones
  int64_t last = 0;   // of its last ones
};

// For each head the `count` slots with the highest scores, the protected ones before all others, in
// ascending order; of equal scores the earlier slot. `scores`: [heads][num_slots], of which NaN
// counts as the lowest. Throws InvalidArgument unless protected slots <= count <= num_slots, and
// count is at least 1.
std::vector<std::vector<int32_t>> top_slots(std::span<const float> scores, int64_t heads,
                                            int64_t num_slots, int64_t count, Protected kept);

}  // namespace effinfer::kv
