#include "executor/device_weights.h"

namespace effinfer::executor {

// All of each plane, with the room that it has: nobody knows which numbers the host has written
// since.
std::span<const ops::SlotWeights> DeviceWeights::upload(const Step& step, size_t sequences,
                                                        Queue& queue) {
  weighted_.assign(num_names_ * sequences, {});
  const std::span<const WeightedSlots> listed = step.batch->weighted;
  if (weighted_.empty() || listed.empty()) return weighted_;
  const auto own = static_cast<size_t>(step.layout.num_sequences);
  const std::span given(step.weighted, num_names_ * own);
  const auto numbers_of = [&](const ops::SlotWeights& each) {
    return static_cast<size_t>(listed[0].plane.num_heads * each.stride);
  };
  size_t numbers = 0;
  for (const ops::SlotWeights& each : given) numbers += numbers_of(each);
  if (numbers > room_) reserve(2 * numbers);
  auto* to = static_cast<float*>(memory_.get());
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].values == nullptr) continue;
    queue.upload(to, given[i].values, numbers_of(given[i]) * sizeof(float));
    weighted_[i / own * sequences + i % own] = {to, given[i].stride};
    to += numbers_of(given[i]);
  }
  return weighted_;
}

void DeviceWeights::reserve(size_t numbers) {
  room_ = 0;
  memory_.reset();
  memory_ = allocate_(numbers * sizeof(float), "weights of keys");
  room_ = numbers;
}

}  // namespace effinfer::executor
