#include "core/affinity.h"

namespace effinfer::core {

// Where the system refuses, as after a change of the process's cores, the thread runs on others: it
// is slower, and its results are the same.
void pin_thread(std::span<const int> cores) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int core : cores) CPU_SET(static_cast<size_t>(core), &mask);
  sched_setaffinity(0, sizeof mask, &mask);
}

PinnedHere::PinnedHere(int core) {
  if (sched_getaffinity(0, sizeof before_, &before_) != 0) return;
  if (CPU_COUNT(&before_) == 1 && CPU_ISSET(static_cast<size_t>(core), &before_)) return;
  pin_thread({&core, 1});
  changed_ = true;
}

PinnedHere::~PinnedHere() {
  if (changed_) sched_setaffinity(0, sizeof before_, &before_);
}

}  // namespace effinfer::core
