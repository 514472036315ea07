// An AttentionPlan on GPUs: what its kernels read of it, and the memory of their partial results.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "effinfer/executor.h"
#include "effinfer/ops/attention.h"
#include "ops/attention.h"

namespace effinfer::ops {

// Lists of a plan in the host's memory.
struct PlanLists {
  BatchLayout batch;
  int64_t num_listed = 0;  // of batch.kv_indices
  const std::vector<uint8_t>* mask = nullptr;
  const std::vector<int64_t>* mask_starts = nullptr;
  const std::vector<int64_t>* mask_row_strides = nullptr;
  const AttentionLists* blocks = nullptr;  // of spans; null: all keys
};

// What a plan takes there at most.
struct PlanRoom {
  size_t spans = 0;
  size_t tiles = 0;
  size_t items = 0;  // kernels have a block for each: those that are not needed are none
  size_t merges = 0;
  size_t sequences = 0;
  size_t listed = 0;
  size_t mask_bytes = 0;
  size_t partials = 0;
  size_t dims = 0;  // of values

  static PlanRoom of(const AttentionWork& work, const PlanLists& lists, int32_t dims);
};

// Memory with room for a plan. Its addresses follow from the room alone.
class PlanMemory {
 public:
  PlanMemory(const PlanRoom& room, Queue& queue, std::shared_ptr<void> (*allocate)(Queue&, size_t));

  void put(const AttentionWork& work, const PlanLists& lists, Queue& queue);
  // Points a problem to the plan.
  void point(AttentionProblem& problem) const;
  const PlanRoom& room() const { return room_; }

 private:
  PlanRoom room_;
  std::shared_ptr<void> memory_;
  AttentionProblem problem_;  // whose pointers to lists and partial results are set
  size_t done_ = 0;           // where the counters are
};

// Made for a stream when something is run there first, for any number of runs after it: those of a
// stream follow each other, and so share the memory of partial results.
class DevicePlans {
 public:
  // Points a problem to its lists in the memory of the queue's device, and to its work there, cut
  // for GPUs.
  void place(AttentionProblem& problem, const AttentionShape& shape, const PlanLists& lists,
             Queue& queue);
  // Where the plan lies on a device from now on, as long as its owner is the same.
  void fix(std::shared_ptr<const FixedPlans::Impl> fixed) {
    const std::lock_guard lock(mutex_);
    fixed_ = std::move(fixed);
  }

 private:
  struct Placed {
    Device device;
    const void* stream;
    PlanMemory memory;
  };

  std::mutex mutex_;
  std::vector<Placed> placed_;
  std::shared_ptr<const FixedPlans::Impl> fixed_;
};

}  // namespace effinfer::ops

struct effinfer::ops::FixedPlans::Impl {
  size_t most_listed;
  size_t most_mask_bytes;
  mutable std::mutex mutex;
  std::optional<PlanMemory> memory;
  Device device;
  AttentionGeometry geometry;
  size_t sequences = 0;
  int64_t rows = 0;
  const DevicePlans* owner = nullptr;  // of the plan that was put there last

  // Checks that a plan fits, and puts it there.
  void put(const DevicePlans* plans, const AttentionGeometry& given, const AttentionShape& shape,
           const PlanLists& lists, Queue& queue);
};
