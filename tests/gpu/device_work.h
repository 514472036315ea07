// The items of attention and the memory of their partial results, on the device.
#pragma once

#include <cstdint>
#include <vector>

#include "cpp/check.h"
#include "gpu/device_arrays.h"
#include "ops/attention.h"

namespace effinfer {

class DeviceWork {
 public:
  DeviceWork(const ops::AttentionWork& work, int32_t dims)
      : view_(work),
        spans_(work.spans),
        tiles_(work.tiles),
        items_(work.items),
        merges_(work.merges),
        arranged_(work.arranged),
        done_(std::vector<int32_t>(work.merges.size() + 1)),
        partial_out_(static_cast<size_t>(work.num_partials * dims)),
        partial_ms_(static_cast<size_t>(work.num_partials) * 2),
        arranged_pages_(work.arranged.size() * ops::arranged_page_bytes(dims)) {
    view_.spans = spans_.data();
    view_.tiles = tiles_.data();
    view_.items = items_.data();
    view_.merges = merges_.data();
    view_.arranged = arranged_.data();
  }

  void point(ops::AttentionProblem& p) const {
    p.work = view_;
    p.partial_out = partial_out_.data();
    p.partial_ms = partial_ms_.data();
    p.done = done_.data();
    p.arranged = arranged_pages_.data();
  }
  // Whoever merges the last partial result leaves its count as it was.
  void check_counts() const {
    for (const int32_t count : done_.values()) CHECK_EQ(count, 0);
  }

 private:
  ops::AttentionWorkView view_;
  DeviceArray<ops::TokenSpan> spans_;
  DeviceArray<ops::AttentionTile> tiles_;
  DeviceArray<ops::AttentionItem> items_;
  DeviceArray<ops::AttentionMerge> merges_;
  DeviceArray<ops::ArrangedPage> arranged_;
  DeviceArray<int32_t> done_;
  DeviceArray<float> partial_out_;
  DeviceArray<float> partial_ms_;
  DeviceArray<uint8_t> arranged_pages_;
};

}  // namespace effinfer
