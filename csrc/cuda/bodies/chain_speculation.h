// Speculative sampling of a chain of drafts (ops/row_sampling.h): a block a row of drafts.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_draw.h"
#include "cuda/bodies/row_passes.h"
#include "cuda/unit.h"
#include "ops/row_sampling.h"

namespace effinfer::cuda {

// What a target has more than a draft, or the target.
struct ExcessValues {
  using Floats = RowValues;
  static constexpr int kPerLane = Floats::kPerLane;

  Floats target;
  const float* draft = nullptr;  // null: none
  int size = 0;
  int part = 0;

  EFFINFER_DEVICE ExcessValues(const float* target_row, const float* draft_row, int count,
                               bool vectored, RowRing& ring)
      : target(Floats::of(target_row, count, vectored, ring)),
        draft(draft_row),
        size(count),
        part(target.part) {}

  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, int first, float fill, float (&out)[kPerLane]) const {
    target.load(unit, first, fill, out);
    subtract(unit, first, out);
  }
  template <class Unit, class Visit>
  EFFINFER_DEVICE void visit(Unit& unit, float fill, Visit&& each) const {
    target.visit(unit, fill, [&](float (&x)[kPerLane], int first) {
      subtract(unit, first, x);
      each(x, first);
    });
  }

 private:
  // A NaN stays one.
  template <class Unit>
  EFFINFER_DEVICE void subtract(Unit& unit, int first, float (&x)[kPerLane]) const {
    if (draft == nullptr) return;
    Floats other = target;
    other.row = draft;
    float y[kPerLane];
    other.load(unit, first, 0.0f, y);
    EFFINFER_UNROLL
    for (int e = 0; e < kPerLane; ++e) {
      const float difference = x[e] - y[e];
      x[e] = difference < 0.0f ? 0.0f : difference;
    }
  }
};

struct ChainSpeculationParams {
  ops::ChainSpeculationProblem problem;
  bool vectored;
};

struct ChainSpeculation {
  static constexpr const char* kName = "chain_speculation";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMinBlocks = 1;
  using Params = ChainSpeculationParams;
  struct Shared {
    RowExchange exchange;
    RowParts parts;
    RowRing ring;
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::ChainSpeculationProblem& p = params.problem;
    const int64_t row = unit.block;
    const float* targets = p.target_probs + row * (p.drafts + 1) * p.vocab;
    const float* drafts = p.draft_probs + row * p.drafts * p.vocab;
    const int32_t* ids = p.draft_ids + row * p.drafts;
    RowBlock<Unit> block(unit, shared.exchange);
    const Chain chain = verify(block, p, row);
    ops::RowStatus status = ops::RowStatus::nan;
    int64_t emitted = -1;
    if (!chain.has_nan) {
      const float* target = targets + chain.emitted * p.vocab;
      const float* draft = chain.emitted < p.drafts ? drafts + chain.emitted * p.vocab : nullptr;
      status = draw(block, params, row, target, draft, chain.emitted, shared);
      // Where a draft leaves nothing of its target.
      if (status == ops::RowStatus::nothing && draft != nullptr) {
        status = draw(block, params, row, target, nullptr, chain.emitted, shared);
      }
      if (status == ops::RowStatus::ok) emitted = chain.emitted;
    }
    for (int64_t i = unit.thread; i <= p.drafts; i += kThreads) {
      if (i != emitted) p.tokens[row * (p.drafts + 1) + i] = i < emitted ? ids[i] : -1;
    }
    if (unit.thread != 0) return;
    if (p.statuses != nullptr) p.statuses[row] = status;
    if (emitted < 0) return;
    p.accepted[row] += chain.accepted;
    p.emitted[row] += static_cast<int32_t>(emitted);
  }

 private:
  struct Chain {
    int64_t emitted;  // drafts before the first that is rejected
    int accepted;     // those that would be, each by itself
    bool has_nan;
  };

  template <class Unit>
  EFFINFER_DEVICE static Chain verify(RowBlock<Unit>& block, const ops::ChainSpeculationProblem& p,
                                      int64_t row) {
    int accepted[1] = {};
    int most[2] = {};  // drafts from the first rejected one on; whether there is a NaN
    const auto count = static_cast<int>(p.drafts);
    for (int i = block.unit().thread; i < count; i += kThreads) {
      const int32_t id = p.draft_ids[row * p.drafts + i];
      const auto target =
          static_cast<double>(p.target_probs[(row * (p.drafts + 1) + i) * p.vocab + id]);
      const auto draft = static_cast<double>(p.draft_probs[(row * p.drafts + i) * p.vocab + id]);
      if (target != target || draft != draft) most[1] = 1;
      const bool accepts = uniform_of(p.random, row, static_cast<uint32_t>(i + 1)) * draft < target;
      if (accepts) {
        ++accepted[0];
      } else if (most[0] < count - i) {
        most[0] = count - i;
      }
    }
    block.sum(accepted);
    block.max(most);
    return {p.drafts - most[0], accepted[0], most[1] != 0};
  }

  // The token at `place` of the row's, if there is a distribution.
  template <class Unit>
  EFFINFER_DEVICE static ops::RowStatus draw(RowBlock<Unit>& block, const Params& params,
                                             int64_t row, const float* target, const float* draft,
                                             int64_t place, Shared& shared) {
    const ops::ChainSpeculationProblem& p = params.problem;
    const ExcessValues values(target, draft, static_cast<int>(p.vocab), params.vectored,
                              shared.ring);
    RowPasses<ExcessValues, Unit> passes(block, values, shared.parts, false);
    const RowExtent extent = passes.extent();
    const ops::RowStatus status = status_of_weights(extent);
    if (status != ops::RowStatus::ok) return status;
    const double point = point_of(uniform_of(p.random, row, 0), extent.total);
    draw_in_row(
        block, values, shared.parts, point, [](float x, int) { return x > 0.0f ? x : 0.0f; },
        [&](int token, const Drawn&) { p.tokens[row * (p.drafts + 1) + place] = token; });
    return status;
  }
};

}  // namespace effinfer::cuda
