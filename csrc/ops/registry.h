// The table of kernel variants: op x device x level.
//
// A variant is a pair of plain functions over one POD problem: `rejects` says why the variant
// cannot run a problem (null when it can), `run` does a team member's share of it, or `launch` puts
// it into a device's queue. register_cpu() and register_cuda() fill the tables explicitly; a
// backend that is not built leaves nothing behind. Selection takes the target device's best variant
// at or below its level; when none fits, the error prints the target, the problem and every
// refusal.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "core/backend.h"
#include "effinfer/device.h"
#include "effinfer/error.h"
#include "effinfer/threads.h"

namespace effinfer::ops {

template <class Problem>
struct Variant {
  std::string name;  // "<op>.<isa>[.<arithmetic>]", as explain() prints it
  Isa isa;           // the level, of a variant of the CPU
  // Why not, or null. Sees shapes and dtypes only, never data, so that it can run at compile time.
  const char* (*rejects)(const Problem&);
  // Of the CPU, called by every member of a team. On return the member's share is done; the caller
  // adds the barrier that makes the result visible.
  void (*run)(const Problem&, Team&);
  // Private memory that each member needs, in bytes; null means none.
  size_t (*scratch_bytes)(const Problem&) = nullptr;
  DeviceKind device = DeviceKind::cpu;
  // Of another device: puts the work into its queue. The problem's pointers are the device's.
  void (*launch)(const Problem&, Queue&) = nullptr;
  int32_t min_arch = 0;  // of a GPU
  // What the threads of a block share; null: as little as any GPU has.
  size_t (*shared_bytes)(const Problem&) = nullptr;
};

// Why a variant cannot run a problem on `target`, or null.
template <class Problem>
const char* refusal(const Variant<Problem>& variant, const Problem& problem, const Target& target) {
  if (variant.device != target.device.kind) return "runs on another device";
  if (variant.min_arch > target.arch) return "needs a newer GPU";
  if (variant.isa > target.isa) return "needs a higher ISA level";
  if (const char* reason = variant.rejects(problem)) return reason;
  const bool shares = variant.shared_bytes != nullptr;
  if (shares && static_cast<int64_t>(variant.shared_bytes(problem)) > target.shared_bytes) {
    return "needs more shared memory than a block of this GPU has";
  }
  return nullptr;
}

// Whether a variant that fits is to be preferred to another one that does.
template <class Problem>
bool is_better(const Variant<Problem>& variant, const Variant<Problem>* than) {
  return than == nullptr || (variant.isa >= than->isa && variant.min_arch >= than->min_arch);
}

template <class Problem>
class Table {
 public:
  void add(const Variant<Problem>& variant) { variants_.push_back(variant); }

  // The variant to use on `target`: the highest level first, then the last added. Throws
  // Unsupported with describe(problem) and each variant's reason.
  const Variant<Problem>& select(const Problem& problem, const Target& target) const {
    const Variant<Problem>* best = nullptr;
    std::string reasons;
    for (const Variant<Problem>& variant : variants_) {
      const char* reason = refusal(variant, problem, target);
      if (reason != nullptr) {
        reasons += "\n  " + variant.name + ": " + reason;
      } else if (is_better(variant, best)) {
        best = &variant;
      }
    }
    if (best == nullptr) {
      throw Unsupported("no kernel on " + name(target.device) + " for " + describe(problem) +
                        reasons);
    }
    return *best;
  }

  // What select() finds, or null.
  const Variant<Problem>* find(const Problem& problem, const Target& target) const {
    const Variant<Problem>* best = nullptr;
    for (const Variant<Problem>& variant : variants_) {
      if (refusal(variant, problem, target) != nullptr) continue;
      if (is_better(variant, best)) best = &variant;
    }
    return best;
  }

  const std::vector<Variant<Problem>>& variants() const { return variants_; }

 private:
  std::vector<Variant<Problem>> variants_;
};

// The process-wide table of a problem type; filled before first use by register_cpu().
template <class Problem>
Table<Problem>& mutable_table() {
  static Table<Problem> table;
  return table;
}

// Fills every table with the CPU kernels, once per process. Thread-safe.
void ensure_registered();

template <class Problem>
const Table<Problem>& table() {
  ensure_registered();
  return mutable_table<Problem>();
}

// Selects and runs one problem by itself in a region of its own, on the CPU, whose threads a pool
// has: what effinfer.ops does. A compiled step selects once, for the device of its options, and
// runs many.
template <class Problem>
void run_alone(const Problem& problem, ThreadPool& pool) {
  const Variant<Problem>& variant = table<Problem>().select(problem, current_target());
  if (variant.scratch_bytes != nullptr) pool.reserve_scratch(variant.scratch_bytes(problem));
  pool.parallel([&](Team& team) { variant.run(problem, team); });
}

// Likewise, or puts it into the queue.
template <class Problem>
void run_alone(const Problem& problem, const Executor& executor) {
  Queue* const queue = executor.queue();
  if (queue == nullptr) return run_alone(problem, *executor.pool());
  table<Problem>().select(problem, current_target(queue->device())).launch(problem, *queue);
}

}  // namespace effinfer::ops
