// What a row's sampling comes to: its status, its token, and whether that is the CPU's.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_draw.h"
#include "cuda/bodies/row_list_heads.h"
#include "cuda/unit.h"
#include "ops/row_sampling.h"

namespace effinfer::cuda {

EFFINFER_DEVICE RowLimits limits_of(const ops::RowSamplingProblem& p, int64_t row) {
  RowLimits limits;
  const int64_t k = p.top_k_of(row);
  limits.top_k = k < p.vocab ? static_cast<int>(k) : 0;
  limits.top_p = p.top_p[row];
  limits.min_p = p.min_p[row];
  limits.joint = p.joint;
  return limits;
}

// As RowDistribution::to_weights(): a denormal temperature has no finite inverse.
EFFINFER_DEVICE float factor_of(const ops::RowSamplingProblem& p, int64_t row) {
  return fminf(1.0f / p.temperature[row], 3.40282347e38f);
}

EFFINFER_DEVICE ops::RowStatus status_of(const RowExtent& extent, ops::RowResult result,
                                         bool of_logits) {
  using ops::RowStatus;
  if (of_logits) {
    if (extent.has_nan) return RowStatus::nan;
    if (result == ops::RowResult::logits) return RowStatus::ok;
    if (extent.highest == -INFINITY) return RowStatus::nothing;
    return extent.highest == INFINITY ? RowStatus::infinite : RowStatus::ok;
  }
  return status_of_weights(extent);
}

// By one thread.
EFFINFER_DEVICE void tell_status(const ops::RowSamplingProblem& p, int64_t row,
                                 ops::RowStatus status) {
  if (p.statuses != nullptr) p.statuses[row] = status;
  if (p.valid != nullptr) p.valid[row] = status == ops::RowStatus::ok ? 1 : 0;
}
EFFINFER_DEVICE void refuse_sample(const ops::RowSamplingProblem& p, int64_t row) {
  p.set_sample(row, 0);
  if (p.undecided != nullptr) p.undecided[row] = 0;
}

// The point of a row's weights that its token lies at.
struct RowPoint {
  double point;
  double slack;
  bool undecided;

  template <class Heads>
  EFFINFER_DEVICE static RowPoint of(const ops::RowSamplingProblem& p, int64_t row,
                                     const Heads& heads) {
    const double total = heads.total();
    return {point_of(uniform_of(p.random, row, 0), total), heads.slack(total), heads.undecided()};
  }
  // By the thread that has drawn.
  EFFINFER_DEVICE void settle(const ops::RowSamplingProblem& p, int64_t row, int token,
                              const Drawn& drawn) const {
    p.set_sample(row, token);
    if (p.undecided == nullptr) return;
    // Nothing lies below the first token, where the point is 0.
    const bool near = (drawn.below <= slack && point > 0.0) || drawn.above <= slack;
    p.undecided[row] = undecided || near ? 1 : 0;
  }
};

// The token of the first `size` weights of a list.
template <class Unit>
EFFINFER_DEVICE void draw_listed(RowBlock<Unit>& block, const ops::RowSamplingProblem& p,
                                 int64_t row, const RowPoint& at, const RowList& list, int size) {
  constexpr int kOwn = RowList::kPerThread;
  float weights[kOwn];
  const int first = block.unit().thread * kOwn;
  EFFINFER_UNROLL
  for (int i = 0; i < kOwn; ++i) weights[i] = first + i < size ? list.values[first + i] : 0.0f;
  double sum = 0.0;
  const Drawn drawn = draw(block, weights, at.point, sum);
  if (drawn.here) at.settle(p, row, list.ids[first + drawn.which], drawn);
}

}  // namespace effinfer::cuda
