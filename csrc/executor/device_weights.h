// Copies on a device of the planes that say how often keys count (effinfer/slot_plane.h), which
// attention reads in each layer.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "effinfer/executor.h"
#include "executor/device_lists.h"
#include "executor/step.h"

namespace effinfer::executor {

class DeviceWeights {
 public:
  DeviceWeights(size_t num_names, DeviceLists::Allocate allocate)
      : num_names_(num_names), allocate_(std::move(allocate)) {}

  // Puts the copies of a step's planes into the queue, whose work of the step before has ended.
  // Returns where they come to lie, by names and `sequences`, as many as the step has, rounded.
  std::span<const ops::SlotWeights> upload(const Step& step, size_t sequences, Queue& queue);

 private:
  void reserve(size_t numbers);

  const size_t num_names_;
  const DeviceLists::Allocate allocate_;
  size_t room_ = 0;  // numbers
  std::shared_ptr<void> memory_;
  std::vector<ops::SlotWeights> weighted_;
};

}  // namespace effinfer::executor
