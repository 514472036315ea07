// Where kernels call barriers: for host_unit.cpp.
#pragma once

#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "gpu/host_unit.h"

namespace effinfer::cuda::host {

// Sites that are recorded, and the one that is left out.
class Sites {
 public:
  void record() {
    const std::lock_guard lock(mutex_);
    seen_.clear();
    recording_ = true;
  }
  std::set<Site> recorded() {
    const std::lock_guard lock(mutex_);
    recording_ = false;
    return std::exchange(seen_, {});
  }
  void ignore(const Site& site) {
    ignored_ = site;
    ignoring_ = true;
  }
  bool ignoring() const { return ignoring_; }
  // Whether this call must do nothing.
  bool passes(const char* kernel, const char* what, const Where& where) {
    if (!recording_ && !ignoring_) return false;
    if (ignoring_ && where.line() != ignored_.line) return false;
    Site site{where.file_name(), where.line(), where.column(), kernel, what};
    if (ignoring_) return site == ignored_;
    const std::lock_guard lock(mutex_);
    seen_.insert(std::move(site));
    return false;
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> recording_ = false;
  std::atomic<bool> ignoring_ = false;
  std::set<Site> seen_;
  Site ignored_;
};

}  // namespace effinfer::cuda::host
