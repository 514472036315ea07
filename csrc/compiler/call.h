// A kernel call of a compiled step, and what a step gives to its calls.
//
// Everything that is known at compile time is in the problem already: weights, arena addresses,
// shapes. prepare() fills in the rest on one thread before the parallel region; run() is the
// kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "effinfer/compiler.h"
#include "effinfer/error.h"
#include "kernels/attention.h"
#include "kernels/cost.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "kernels/registry.h"

namespace effinfer::compiler {

struct Step {
  const Batch* batch = nullptr;
  KvCache* cache = nullptr;
  float* logits = nullptr;
  kernels::BatchLayout layout;
  std::span<const kernels::AttentionPlan> plans;  // by the slot of an attention shape

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

// Where a float value lies: in the arena, or in the caller's logits.
struct Floats {
  float* fixed = nullptr;  // null: the logits
  float* at(const Step& step) const { return fixed != nullptr ? fixed : step.logits; }
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
  virtual void run(Team& team) const = 0;
  virtual kernels::Cost cost() const = 0;  // of the step that was prepared last
};

// `Prepare` is a functor bool(Problem&, const Step&).
template <class Problem, class Prepare>
class KernelCall final : public Call {
 public:
  KernelCall(const kernels::Variant<Problem>& variant, const Problem& problem, Prepare prepare)
      : run_(variant.run), problem_(problem), prepare_(std::move(prepare)) {}
  bool prepare(const Step& step) override { return prepare_(problem_, step); }
  void run(Team& team) const override { run_(problem_, team); }
  kernels::Cost cost() const override { return kernels::cost(problem_); }

 private:
  void (*run_)(const Problem&, Team&);
  Problem problem_;
  Prepare prepare_;
};

}  // namespace effinfer::compiler
