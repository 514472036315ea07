// A kernel call of a compiled step, and a member's way through a step's calls.
//
// Everything that is known at compile time is in the problem already: weights, shapes. prepare()
// fills in the rest on one thread before the parallel region; run() is the kernel. In a small step
// (fuse_regions) values of a member's own lie elsewhere for each member, which fills in its own
// copy.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "effinfer/cancel.h"
#include "effinfer/threads.h"
#include "executor/step.h"
#include "ops/cost.h"
#include "ops/registry.h"

namespace effinfer::executor {

class Call {
 public:
  virtual ~Call() = default;
  // Fills the fields that depend on the step; false: nothing to do in this step.
  virtual bool prepare(const Step& step) = 0;
  // `step` is the prepared one, or the same with the member's own arena.
  virtual void run(const Step& step, Team& team) const = 0;
  // On a device other than the CPU: puts the prepared step's work into its queue.
  virtual void launch(Queue& queue) const = 0;
  virtual ops::Cost cost() const = 0;  // of the step that was prepared last

  bool every_member = false;  // in a small step: no barrier follows
};

// `Places` are those of the problem (places.h).
template <class Problem, class Places>
class KernelCall final : public Call {
 public:
  KernelCall(const ops::Variant<Problem>& variant, const Problem& problem, const Places& places)
      : run_(variant.run), launch_(variant.launch), problem_(problem), places_(places) {}
  bool prepare(const Step& step) override { return places_.fill(problem_, step); }
  void run(const Step& step, Team& team) const override {
    if (step.own == nullptr) return run_(problem_, team);
    Problem mine = problem_;
    places_.fill(mine, step);
    run_(mine, team);
  }
  void launch(Queue& queue) const override { launch_(problem_, queue); }
  ops::Cost cost() const override {
    using ops::cost;
    return cost(problem_);
  }

 private:
  void (*run_)(const Problem&, Team&);
  void (*launch_)(const Problem&, Queue&);
  Problem problem_;
  Places places_;
};

// A step and the calls that it needs. In a small step members have arenas of their own.
struct Region {
  const Step& step;
  std::span<const Call* const> calls;
  std::byte* own = nullptr;             // of member 0; null: not a small step
  size_t own_bytes = 0;                 // from one member's to the next
  const CancelToken* cancel = nullptr;  // null: nobody can
  // The call behind whose barrier all members leave. A number, since a member that is late at a
  // barrier may read it when the first one has decided about the next.
  mutable std::atomic<size_t> last = SIZE_MAX;

  // Of the calls those that ran.
  size_t num_run() const {
    const size_t stopped = last.load(std::memory_order_relaxed);
    return stopped < calls.size() ? stopped + 1 : calls.size();
  }

  // Runs the calls on one member, up to where the step is cancelled. `timer.begin()`,
  // `timer.done()` and `timer.end()` are called before and after each call and after its barrier.
  template <class Timer>
  void run(Team& team, Timer&& timer) const {
    Step mine = step;
    if (own != nullptr) mine.own = own + static_cast<size_t>(team.rank()) * own_bytes;
    for (size_t i = 0; i < calls.size(); ++i) {
      const Call* call = calls[i];
      timer.begin();
      if (own != nullptr && call->every_member) {
        Team alone = team.alone();
        call->run(mine, alone);
        timer.done();
      } else {
        call->run(mine, team);
        timer.done();
        if (cancel != nullptr && team.rank() == 0 && cancel->is_cancelled()) {
          size_t unset = SIZE_MAX;
          last.compare_exchange_strong(unset, i, std::memory_order_relaxed);
        }
        team.barrier();
        if (cancel != nullptr && last.load(std::memory_order_relaxed) <= i) return timer.end();
      }
      timer.end();
    }
  }
};

struct NoTimer {
  void begin() {}
  void done() {}
  void end() {}
};

}  // namespace effinfer::executor
