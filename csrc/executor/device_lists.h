// Memory on a device for the lists of what rows visit, and for what the kernels that choose hand to
// each other.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ops/visits.h"

namespace effinfer::executor {

class DeviceLists {
 public:
  // Memory of so many bytes, for what a message says; throws OutOfMemory.
  using Allocate = std::function<std::shared_ptr<void>(size_t bytes, const char* what)>;

  explicit DeviceLists(Allocate allocate) : allocate_(std::move(allocate)) {}

  // A plan with memory for any step of a slot, whose largest plan this is.
  ops::VisitPlan add(const ops::VisitPlan& largest, const ops::VisitShape& shape);

 private:
  template <class T>
  T* take(int64_t count, const char* what);

  Allocate allocate_;
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace effinfer::executor
