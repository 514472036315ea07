// The first pass over rows that are split: the highest and the lowest value of each part, and the
// highest of each group of them.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/split_rows.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

struct RowExtents {
  static constexpr const char* kName = "row_extents";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMinBlocks = 4;
  using Params = SplitParams;
  struct Shared {
    ValueExtent extents[kRowWarps];
  };
  // Lanes whose chunks of all turns are a group.
  static constexpr int kGroupLanes = ops::SamplingScratch::kGroup / SplitRow::kOfThread;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const SplitRow row(unit, params);
    const bool of_logits = params.problem.source == ops::RowSource::logits;
    float x[SplitRow::kOfThread];
    row.load(unit, of_logits ? -INFINITY : 0.0f, x);
    clear(unit, row);
    ValueExtent mine{-INFINITY, INFINITY};
    bool nan = false;
    EFFINFER_UNROLL
    for (int i = 0; i < SplitRow::kOfThread; ++i) {
      nan = nan || x[i] != x[i];
      mine.highest = fmaxf(mine.highest, x[i]);
      if (!of_logits) mine.lowest = fminf(mine.lowest, x[i]);
    }
    EFFINFER_UNROLL
    for (int mask = 1; mask < kWarp; mask *= 2) {
      if (mask == kGroupLanes && unit.lane % kGroupLanes == 0) {
        const int group = (row.part * kThreads + unit.thread) / kGroupLanes;
        row.maxima()[group] = mine.highest;
      }
      join(unit, mine, mask);
    }
    if (unit.ballot(nan) != 0) mine.highest = NAN;
    if (unit.lane == 0) shared.extents[unit.warp] = mine;
    unit.sync();
    if (unit.warp != 0) return;
    mine = shared.extents[unit.lane % kRowWarps];
    nan = mine.highest != mine.highest;
    EFFINFER_UNROLL
    for (int mask = 1; mask < kRowWarps; mask *= 2) join(unit, mine, mask);
    if (unit.ballot(nan) != 0) mine.highest = NAN;
    if (unit.lane == 0) row.extents()[row.part] = mine;
  }

 private:
  // What the kernels behind this one count in.
  template <class Unit>
  EFFINFER_DEVICE static void clear(Unit& unit, const SplitRow& row) {
    for (int i = row.part * kThreads + unit.thread; i < ops::SamplingScratch::kBins;
         i += row.parts * kThreads) {
      row.bins()[i] = 0;
    }
    if (row.part == 0 && unit.thread == 0) {
      row.state() = {RowPlan::rest, INFINITY, INFINITY, 0, 0};
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void join(Unit& unit, ValueExtent& mine, int mask) {
    mine.highest = fmaxf(mine.highest, unit.shfl_xor(mine.highest, mask));
    mine.lowest = fminf(mine.lowest, unit.shfl_xor(mine.lowest, mask));
  }
};

}  // namespace effinfer::cuda
