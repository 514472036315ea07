// Rows that are drawn from by several blocks each: what these share (ops/sampling_scratch.h), and
// how a row goes from kernel to kernel:
//
//   RowExtents   of each part the highest value, and of groups of values too
//   RowRanges    where a filter may end: a range of values that holds it and few others
//   WeighParts   sums of exact weights, and what lies in that range
//   SampleRows   a block a row: the end of it (split_end.h), or all where nothing else has it
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_block.h"
#include "cuda/bodies/row_outcome.h"
#include "cuda/bodies/row_values.h"
#include "cuda/bodies/row_weights.h"
#include "cuda/unit.h"
#include "ops/row_sampling.h"
#include "ops/sampling_scratch.h"

namespace effinfer::cuda {

struct SplitParams {
  ops::RowSamplingProblem problem;
  ops::SamplingScratch scratch;
  bool vectored;  // rows of x
};

struct SplitState {
  RowPlan plan;
  float low;  // of the range
  float high;
  int32_t arrived;  // blocks that have counted weights
  int32_t listed;
};

// Values that a filter may keep or not.
struct RowRange {
  RowPlan plan;
  float low;
  float high;
};

// What filters ask for, without looking at values.
EFFINFER_DEVICE RowPlan plan_of(const RowLimits& limits, int parts) {
  if (limits.top_k > 0) {
    // The maxima of groups bound the k-th highest value well for up to so many.
    const int most = parts * (ops::SamplingScratch::kPart / ops::SamplingScratch::kGroup) / 2;
    return limits.joint || limits.top_k > most ? RowPlan::rest : RowPlan::few;
  }
  return limits.top_p < 1.0f ? RowPlan::share : RowPlan::all;
}

// Of a warp of a part, whose values lie together.
struct WarpSums {
  double kept;   // weights above the range
  double total;  // all weights
  int32_t first;
  int32_t listed;  // entries of the list
};

struct ValueExtent {
  float highest;  // a NaN where there is one
  float lowest;
};

static_assert(sizeof(SplitState) <= ops::SamplingScratch::kStateBytes);
static_assert(sizeof(ValueExtent) == ops::SamplingScratch::kExtentBytes);
static_assert(sizeof(WarpSums) == ops::SamplingScratch::kWarpBytes);
static_assert(kRowWarps == ops::SamplingScratch::kWarps);

// A part of a row, which is the block's.
class SplitRow {
 public:
  using Scratch = ops::SamplingScratch;
  static constexpr int kPart = Scratch::kPart;
  static constexpr int kOfWarp = kPart / kRowWarps;
  static constexpr int kChunks = kOfWarp / RowValues::kPerTile;  // of a thread
  static constexpr int kOfThread = kChunks * RowValues::kPerLane;
  static constexpr int kGroups = kPart / Scratch::kGroup;

  template <class Unit>
  EFFINFER_DEVICE SplitRow(Unit& unit, const SplitParams& params)
      : SplitRow(params, unit.block / params.scratch.parts,
                 static_cast<int>(unit.block % params.scratch.parts)) {}
  EFFINFER_DEVICE SplitRow(const SplitParams& params, int64_t of_row, int of_part)
      : parts(params.scratch.parts),
        row(of_row),
        part(of_part),
        size_(static_cast<int>(params.problem.vocab)),
        vectored_(params.vectored) {
    const ops::RowSamplingProblem& p = params.problem;
    values_ = static_cast<const float*>(p.x) + p.source_of(row) * p.vocab;
    scratch_ = static_cast<std::byte*>(p.scratch) + row * params.scratch.bytes();
  }

  int parts;
  int64_t row;
  int part;

  EFFINFER_DEVICE SplitState& state() const { return *reinterpret_cast<SplitState*>(scratch_); }
  EFFINFER_DEVICE uint64_t* bins() const {
    return reinterpret_cast<uint64_t*>(scratch_ + Scratch::kStateBytes);
  }
  EFFINFER_DEVICE WarpSums* warps() const {
    return reinterpret_cast<WarpSums*>(bins() + Scratch::kBins);
  }
  EFFINFER_DEVICE ValueExtent* extents() const {
    return reinterpret_cast<ValueExtent*>(warps() + parts * kRowWarps);
  }
  EFFINFER_DEVICE float* maxima() const { return reinterpret_cast<float*>(extents() + parts); }
  EFFINFER_DEVICE float* list_values() const { return maxima() + parts * kGroups; }
  EFFINFER_DEVICE int32_t* list_ids() const {
    return reinterpret_cast<int32_t*>(list_values() + Scratch::kListed);
  }

  // The values of the row, for load().
  EFFINFER_DEVICE RowValues values() const {
    RowValues values;
    values.row = values_;
    values.size = size_;
    values.vectored = vectored_;
    return values;
  }
  // Of chunk i of the thread, the first value: lanes have chunks by turns.
  template <class Unit>
  EFFINFER_DEVICE int first(Unit& unit, int i) const {
    return part * kPart + unit.warp * kOfWarp + i * RowValues::kPerTile +
           unit.lane * RowValues::kPerLane;
  }
  // The thread's chunks, all under way at once, `fill` behind the row's end.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, float fill, float (&x)[kOfThread]) const {
    const RowValues from = values();
    EFFINFER_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      float chunk[RowValues::kPerLane];
      from.load(unit, first(unit, i), fill, chunk);
      EFFINFER_UNROLL
      for (int e = 0; e < RowValues::kPerLane; ++e) x[i * RowValues::kPerLane + e] = chunk[e];
    }
  }

  // Where RowRanges has run, or no filter needs it.
  EFFINFER_DEVICE RowRange range(const RowLimits& limits) const {
    const RowPlan plan = plan_of(limits, parts);
    if (plan != RowPlan::few && plan != RowPlan::share) return {plan, INFINITY, INFINITY};
    return {state().plan, state().low, state().high};
  }

  // Of a row whose parts have been weighed: whether the list has what is asked of it.
  EFFINFER_DEVICE RowPlan ended_plan(const RowLimits& limits) const {
    const RowPlan plan = range(limits).plan;
    const bool is_listed = plan == RowPlan::few || plan == RowPlan::share;
    return is_listed && state().listed > RowList::kMost ? RowPlan::rest : plan;
  }

  // Of the row, by each warp. Its total is a stand-in, positive where the true one is.
  template <class Unit>
  EFFINFER_DEVICE RowExtent extent(Unit& unit) const {
    float highest = -INFINITY;
    float lowest = INFINITY;
    bool nan = false;
    EFFINFER_NO_UNROLL
    for (int i = unit.lane; i < parts; i += kWarp) {
      const ValueExtent of_part = extents()[i];
      nan = nan || of_part.highest != of_part.highest;
      highest = fmaxf(highest, of_part.highest);
      lowest = fminf(lowest, of_part.lowest);
    }
    EFFINFER_UNROLL
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      highest = fmaxf(highest, unit.shfl_xor(highest, mask));
      lowest = fminf(lowest, unit.shfl_xor(lowest, mask));
    }
    return {highest, highest, lowest, unit.ballot(nan) != 0, static_cast<double>(highest)};
  }

  // Counts the row's blocks as they come here: true in all threads of the last one, which then sees
  // what the others have stored before. `flag` is shared.
  template <class Unit>
  EFFINFER_DEVICE bool ends_row(Unit& unit, int32_t& flag) const {
    unit.sync();
    if (unit.thread == 0) {
      unit.fence();
      flag = unit.atomic_add(&state().arrived, 1) + 1 == parts ? 1 : 0;
      unit.fence();
    }
    unit.sync();
    return flag != 0;
  }

 private:
  int size_;
  bool vectored_;
  const float* values_;
  std::byte* scratch_;
};

}  // namespace effinfer::cuda
