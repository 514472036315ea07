#include "kv/top_slots.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "effinfer/error.h"

namespace effinfer::kv {

std::vector<std::vector<int32_t>> top_slots(std::span<const float> scores, int64_t heads,
                                            int64_t num_slots, int64_t count, Protected kept) {
  if (heads < 1 || scores.size() != static_cast<size_t>(heads * num_slots)) {
    throw InvalidArgument("[top_slots] scores: expected " + std::to_string(heads) + " x " +
                          std::to_string(num_slots) + ", got " + std::to_string(scores.size()));
  }
  if (kept.first < 0 || kept.last < 0 || count < std::max<int64_t>(kept.first + kept.last, 1) ||
      count > num_slots) {
    throw InvalidArgument("[top_slots] count: expected " +
                          std::to_string(std::max<int64_t>(kept.first + kept.last, 1)) +
                          " (the protected slots) to " + std::to_string(num_slots) + ", got " +
                          std::to_string(count));
  }
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(heads));
  std::vector<int32_t> free(static_cast<size_t>(num_slots - kept.first - kept.last));
  for (int64_t head = 0; head < heads; ++head) {
    const float* row = scores.data() + head * num_slots;
    const auto higher = [&](int32_t a, int32_t b) {
      const bool nan_a = std::isnan(row[a]);
      const bool nan_b = std::isnan(row[b]);
      if (nan_a != nan_b) return nan_b;
      if (!nan_a && row[a] != row[b]) return row[a] > row[b];
      return a < b;
    };
    std::iota(free.begin(), free.end(), static_cast<int32_t>(kept.first));
    const auto end = free.begin() + (count - kept.first - kept.last);
    std::nth_element(free.begin(), end, free.end(), higher);
    auto& list = lists[static_cast<size_t>(head)];
    list.resize(static_cast<size_t>(kept.first));
    std::iota(list.begin(), list.end(), 0);
    list.insert(list.end(), free.begin(), end);
    std::sort(list.begin() + kept.first, list.end());
    for (int64_t slot = num_slots - kept.last; slot < num_slots; ++slot) {
      list.push_back(static_cast<int32_t>(slot));
    }
  }
  return lists;
}

}  // namespace effinfer::kv
