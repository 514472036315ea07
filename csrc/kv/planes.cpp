#include "kv/planes.h"

#include <algorithm>

#include "effinfer/kv_cache.h"

namespace effinfer::kv {

// Room grows by doubling, to whole pages: kernels write up to the end of the last one.
void Plane::add(int64_t first, int64_t end) {
  if (end > stride) {
    const auto pages = static_cast<int64_t>(KvCache::pages_for(static_cast<size_t>(end)));
    const int64_t wider = std::max(pages * KvCache::kPageSize, 2 * stride);
    std::vector<float> moved(static_cast<size_t>(num_heads * wider));
    for (int64_t head = 0; head < num_heads; ++head) {
      std::copy_n(values.data() + head * stride, first, moved.data() + head * wider);
    }
    values = std::move(moved);
    stride = wider;
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    float* row = values.data() + head * stride;
    std::fill(row + first, row + end, 0.0f);
  }
}

void Plane::close_up(int64_t first, std::span<const int32_t> rows) {
  for (int64_t head = 0; head < num_heads; ++head) {
    float* row = values.data() + head * stride + first;
    for (size_t i = 0; i < rows.size(); ++i) row[i] = row[rows[i]];
  }
}

void Plane::retain(std::span<const std::vector<int32_t>> lists) {
  for (int64_t head = 0; head < num_heads; ++head) {
    float* row = values.data() + head * stride;
    const auto& list = lists[lists.size() == 1 ? 0 : static_cast<size_t>(head)];
    for (size_t i = 0; i < list.size(); ++i) row[i] = row[list[i]];
  }
}

void Plane::evict(int64_t begin, int64_t end, int64_t num_slots) {
  for (int64_t head = 0; head < num_heads; ++head) {
    float* row = values.data() + head * stride;
    std::copy(row + end, row + num_slots, row + begin);
  }
}

}  // namespace effinfer::kv
