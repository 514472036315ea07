// A kernel call of a compiled step, and a member's way through a step's calls.
//
// Everything that is known at compile time is in the problem already: weights, shapes. prepare()
// fills in the rest on one thread before the parallel region; run() is the kernel. In a small step
// (fuse_regions) values of a member's own lie elsewhere for each member, which fills in its own
// copy.
#pragma once

#include <cstddef>
#include <span>

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
  std::byte* own = nullptr;  // of member 0; null: not a small step
  size_t own_bytes = 0;      // from one member's to the next

  // Runs the calls on one member. `timer.begin()`, `timer.done()` and `timer.end()` are called
  // before and after each call and after its barrier.
  template <class Timer>
  void run(Team& team, Timer&& timer) const {
    Step mine = step;
    if (own != nullptr) mine.own = own + static_cast<size_t>(team.rank()) * own_bytes;
    for (const Call* call : calls) {
      timer.begin();
      if (own != nullptr && call->every_member) {
        Team alone = team.alone();
        call->run(mine, alone);
        timer.done();
      } else {
        call->run(mine, team);
        timer.done();
        team.barrier();
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
