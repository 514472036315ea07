// An AttentionPlan on GPUs: what its kernels read of it, and the memory of their partial results.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "effinfer/executor.h"
#include "ops/attention.h"

namespace effinfer::ops {

// Lists of a plan in the host's memory.
struct PlanLists {
  BatchLayout batch;
  int64_t num_listed = 0;  // of batch.kv_indices
  const std::vector<uint8_t>* mask = nullptr;
  const std::vector<int64_t>* mask_starts = nullptr;
  const std::vector<int64_t>* mask_row_strides = nullptr;
};

// Made for a stream when something is run there first, for any number of runs after it: those of a
// stream follow each other, and so share the memory of partial results.
class DevicePlans {
 public:
  // Points a problem to its lists in the memory of the queue's device, and to its work there, cut
  // for GPUs.
  void place(AttentionProblem& problem, const PlanLists& lists, Queue& queue);

 private:
  struct Placed {
    Device device;
    const void* stream;
    std::shared_ptr<void> memory;
    AttentionProblem problem;  // whose pointers to lists and partial results are set
  };
  static Placed placed(const AttentionProblem& problem, const PlanLists& lists, Queue& queue);

  std::mutex mutex_;
  std::vector<Placed> placed_;
};

}  // namespace effinfer::ops
