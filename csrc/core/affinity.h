// Which cores the calling thread may run on.
#pragma once

#include <sched.h>

#include <span>

namespace effinfer::core {

// From now on.
void pin_thread(std::span<const int> cores);

// To one core, for as long as it lives.
class PinnedHere {
 public:
  explicit PinnedHere(int core);
  ~PinnedHere();
  PinnedHere(const PinnedHere&) = delete;
  PinnedHere& operator=(const PinnedHere&) = delete;

 private:
  cpu_set_t before_;
  bool changed_ = false;
};

}  // namespace effinfer::core
