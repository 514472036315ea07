// A token of a row by a uniform number: the one in whose weight the point lies, weights one after
// the other in the order of tokens.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/philox.h"
#include "cuda/bodies/row_block.h"
#include "cuda/bodies/row_passes.h"
#include "cuda/unit.h"
#include "ops/row_sampling.h"

namespace effinfer::cuda {

// The uniform number of an output, as ops::RowRandom::uniform() has it.
EFFINFER_DEVICE double uniform_of(const ops::RowRandom& random, int64_t row, uint32_t draw) {
  const uint32_t place = random.seed.values == nullptr ? static_cast<uint32_t>(row) : 0;
  return philox_uniform(random.seed[row], random.offset[row], place, draw);
}

// The point of a row's weights that a uniform number names, away from their sum's rounding.
EFFINFER_DEVICE double point_of(double uniform, double total) {
  return fmin(uniform * total, total * (1.0 - 0x1p-40));
}

// What a draw comes to.
struct Drawn {
  bool here = false;   // it is this thread's
  int which = 0;       // of its weights
  double below = 0.0;  // from the lower end of its weight to the point drawn
  double above = 0.0;  // and on to its upper end
};

// The token at `point` of the block's weights, those of a thread in order, threads in order; none
// where their sum is not above it.
template <class T, int kCount, class Unit>
EFFINFER_DEVICE Drawn draw(RowBlock<Unit>& block, const T (&weights)[kCount], double point,
                           double& total) {
  Unit& unit = block.unit();
  double mine = 0.0;
  EFFINFER_UNROLL
  for (int i = 0; i < kCount; ++i) mine += static_cast<double>(weights[i]);
  const double before = block.prefix(mine, total);
  Drawn drawn;
  if (!(point < total)) return drawn;
  // Rounding may leave gaps between threads: the last that begins at or below the point has it.
  int last[1] = {mine > 0.0 && before <= point ? unit.thread : -1};
  block.max(last);
  if (last[0] != unit.thread) return drawn;
  drawn.here = true;
  double left = point - before;
  bool passed = false;
  EFFINFER_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const auto weight = static_cast<double>(weights[i]);
    if (passed || !(weight > 0.0)) continue;
    drawn.which = i;
    drawn.below = left;
    left -= weight;
    drawn.above = -left;
    passed = left < 0.0;
  }
  return drawn;
}

// The token at `point` of a row: weigh(x, index) of the part that has it. Calls done(token,
// distance from the next bounds) in one thread.
template <class Values, class Unit, class Weigh, class Done>
EFFINFER_DEVICE void draw_in_row(RowBlock<Unit>& block, const Values& values, const RowParts& parts,
                                 double point, Weigh&& weigh, Done&& done) {
  Unit& unit = block.unit();
  int part = -1;
  double left = point;
  double below = point;
  EFFINFER_NO_UNROLL
  for (int w = 0; w < kRowWarps; ++w) {
    const double sum = parts.head[w];
    if (!(sum > 0.0)) continue;
    // The last one that begins at or below the point.
    if (below < 0.0) break;
    part = w;
    left = below < sum * (1.0 - 0x1p-40) ? below : sum * (1.0 - 0x1p-40);
    below -= sum;
  }
  if (part < 0) return;
  const int begin = part * values.part;
  EFFINFER_NO_UNROLL
  for (int first = begin; first < begin + values.part; first += kRowThreads * Values::kPerLane) {
    float x[Values::kPerLane];
    const int mine = first + unit.thread * Values::kPerLane;
    values.load(unit, mine, NAN, x);
    EFFINFER_UNROLL
    for (int e = 0; e < Values::kPerLane; ++e) x[e] = weigh(x[e], mine + e);
    double total = 0.0;
    const Drawn drawn = draw(block, x, left, total);
    if (drawn.here) done(mine + drawn.which, drawn);
    if (left < total) return;
    left -= total;
  }
}

// Why weights are no distribution.
EFFINFER_DEVICE ops::RowStatus status_of_weights(const RowExtent& extent) {
  using ops::RowStatus;
  const bool high = extent.highest == INFINITY;
  const bool opposite = high && extent.lowest == -INFINITY;  // whose sum is a NaN
  if (extent.has_nan || opposite) return RowStatus::nan;
  if (extent.lowest < 0.0f) return RowStatus::negative;
  if (high) return RowStatus::infinite;
  return extent.total > 0.0 ? RowStatus::ok : RowStatus::nothing;
}

}  // namespace effinfer::cuda
