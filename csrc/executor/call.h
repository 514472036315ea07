// A kernel call of a compiled step, what a step gives to its calls, and a member's way through
// them.
//
// Everything that is known at compile time is in the problem already: weights, shapes. prepare()
// fills in the rest on one thread before the parallel region; run() is the kernel. In a small step
// (fuse_regions) values of a member's own lie elsewhere for each member, which fills in its own
// copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "effinfer/compiler.h"
#include "effinfer/error.h"
#include "executor/kv_access.h"
#include "ops/attention.h"
#include "ops/cost.h"
#include "ops/matmul.h"
#include "ops/prefill_index.h"
#include "ops/registry.h"

namespace effinfer::executor {

// The work of attention of one shape in a step, and memory for partial results, which all shapes
// share since layers run one by one.
struct AttentionBuffers {
  ops::AttentionWork work;
  std::vector<int32_t> counters;  // of merges, zeros between calls
  int32_t* done = nullptr;        // the same
  float* partial_out = nullptr;
  float* partial_ms = nullptr;
};

struct Step {
  const Batch* batch = nullptr;
  KvCache* cache = nullptr;
  float* logits = nullptr;
  ops::TopList* top = nullptr;  // [members][rows]; null: all logits are wanted
  int32_t top_k = 0;
  ops::BatchLayout layout;
  std::span<const AttentionBuffers> attention;  // by the slot of an attention shape
  std::span<const ops::VisitPlan> visits;       // by the slot of a visit shape
  std::byte* own = nullptr;                     // a member's own arena in a small step

  ops::KvLayer kv_layer(int32_t layer) const { return KvCacheAccess::layer(*cache, layer); }
  int64_t count(const Dim& dim) const {
    switch (dim.kind) {
      case Dim::Kind::tokens:
        return static_cast<int64_t>(batch->token_ids.size());
      case Dim::Kind::sequences:
        return layout.num_sequences;
      case Dim::Kind::rows:
        return static_cast<int64_t>(batch->logit_rows.size());
      case Dim::Kind::constant:
        break;
    }
    return dim.value;
  }
};

// Where a float value lies: in the arena, in a member's own, or in the caller's logits.
struct Floats {
  float* fixed = nullptr;  // null: the logits
  int64_t own = -1;        // offset, -1: none
  float* at(const Step& step) const {
    if (own >= 0 && step.own != nullptr) return reinterpret_cast<float*>(step.own + own);
    return fixed != nullptr ? fixed : step.logits;
  }
};

// Where a matmul operand lies.
struct OperandPlace {
  ops::Operand largest;  // in the arena, with the rows of the largest step
  int64_t own = -1;
  ops::Operand at(const Step& step, int64_t rows) const {
    ops::Operand view = largest;
    view.rows = rows;
    if (own >= 0 && step.own != nullptr) view.data = step.own + own;
    return view;
  }
};

// Where a graph input lies: in the batch.
struct Ids {
  std::span<const int32_t> Batch::* member = nullptr;
  const int32_t* at(const Step& step) const { return (step.batch->*member).data(); }
};

class Call {
 public:
  virtual ~Call() = default;
  // Fills the fields that depend on the step; false: nothing to do in this step.
  virtual bool prepare(const Step& step) = 0;
  // `step` is the prepared one, or the same with the member's own arena.
  virtual void run(const Step& step, Team& team) const = 0;
  virtual ops::Cost cost() const = 0;  // of the step that was prepared last

  bool every_member = false;  // in a small step: no barrier follows
};

// `Prepare` is a functor bool(Problem&, const Step&).
template <class Problem, class Prepare>
class KernelCall final : public Call {
 public:
  KernelCall(const ops::Variant<Problem>& variant, const Problem& problem, Prepare prepare)
      : run_(variant.run), problem_(problem), prepare_(std::move(prepare)) {}
  bool prepare(const Step& step) override { return prepare_(problem_, step); }
  void run(const Step& step, Team& team) const override {
    if (step.own == nullptr) return run_(problem_, team);
    Problem mine = problem_;
    prepare_(mine, step);
    run_(mine, team);
  }
  ops::Cost cost() const override {
    using ops::cost;
    return cost(problem_);
  }

 private:
  void (*run_)(const Problem&, Team&);
  Problem problem_;
  Prepare prepare_;
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
