#include "kv/planes.h"

#include <algorithm>

#include "core/backend.h"
#include "effinfer/kv_cache.h"

namespace effinfer::kv {

PlaneNumbers::PlaneNumbers(Device device, size_t size) : device_(device), size_(size) {
  if (device.kind == DeviceKind::cpu) {
    const auto numbers = std::make_shared_for_overwrite<float[]>(size);
    values_ = {numbers, numbers.get()};
  } else {
    const auto pinned = cuda_backend()->pinned(device.index, size * sizeof(float));
    values_ = {pinned, reinterpret_cast<float*>(pinned.get())};
  }
  std::fill_n(data(), size, 0.0f);
}

PlaneNumbers::PlaneNumbers(const PlaneNumbers& other) : PlaneNumbers(other.device_, other.size_) {
  std::copy_n(other.data(), size_, data());
}

// Room grows by doubling, to whole pages: kernels write up to the end of the last one.
void Plane::add(PlaneRows heads, int64_t first, int64_t end) {
  if (end > stride) {
    const auto pages = static_cast<int64_t>(KvCache::pages_for(static_cast<size_t>(end)));
    const int64_t wider = std::max(pages * KvCache::kPageSize, 2 * stride);
    PlaneNumbers moved(values.device(), static_cast<size_t>(num_heads * wider));
    for (int64_t head = 0; head < num_heads; ++head) {
      std::copy_n(values.data() + head * stride, stride, moved.data() + head * wider);
    }
    values = std::move(moved);
    stride = wider;
  }
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    float* row = values.data() + head * stride;
    std::fill(row + first, row + end, 0.0f);
  }
}

void Plane::close_up(PlaneRows heads, int64_t first, std::span<const int32_t> rows) {
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    float* row = values.data() + head * stride + first;
    for (size_t i = 0; i < rows.size(); ++i) row[i] = row[rows[i]];
  }
}

void Plane::retain(PlaneRows heads, std::span<const std::vector<int32_t>> lists) {
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    float* row = values.data() + head * stride;
    const auto& list = lists[lists.size() == 1 ? 0 : static_cast<size_t>(head - heads.begin)];
    for (size_t i = 0; i < list.size(); ++i) row[i] = row[list[i]];
  }
}

void Plane::reorder(PlaneRows heads, std::span<const std::vector<int32_t>> lists) {
  std::vector<float> before(lists[0].size());
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    float* row = values.data() + head * stride;
    std::copy_n(row, before.size(), before.begin());
    const auto& list = lists[lists.size() == 1 ? 0 : static_cast<size_t>(head - heads.begin)];
    for (size_t i = 0; i < list.size(); ++i) row[i] = before[static_cast<size_t>(list[i])];
  }
}

void Plane::evict(PlaneRows heads, int64_t begin, int64_t end, int64_t num_slots) {
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    float* row = values.data() + head * stride;
    std::copy(row + end, row + num_slots, row + begin);
  }
}

}  // namespace effinfer::kv
