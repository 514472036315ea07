// A wish that work ends early. Who works looks at it between kernels.
#pragma once

#include <atomic>
#include <memory>

#include "effinfer/error.h"
#include "effinfer/export.h"

namespace effinfer {

// A handle: copies are of one wish, which any thread may utter and look at.
class EFFINFER_API CancelToken {
 public:
  CancelToken() : cancelled_(std::make_shared<std::atomic<bool>>(false)) {}
  void cancel() const { cancelled_->store(true, std::memory_order_relaxed); }
  bool is_cancelled() const { return cancelled_->load(std::memory_order_relaxed); }
  // Throws Cancelled.
  void check() const {
    if (is_cancelled()) throw Cancelled("[cancel] the work was cancelled");
  }

 private:
  std::shared_ptr<std::atomic<bool>> cancelled_;
};

}  // namespace effinfer
