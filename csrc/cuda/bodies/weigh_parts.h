// Exact weights of rows that are split, and the tokens that are drawn by them: each warp adds up
// the weights of its part that lie above the row's range and puts what lies in it into the row's
// list.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/split_rows.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

struct WeighParts {
  static constexpr const char* kName = "weigh_parts";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMinBlocks = 2;
  using Params = SplitParams;
  struct Shared {
    RowExchange exchange;
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const SplitRow row(unit, params);
    const ops::RowSamplingProblem& p = params.problem;
    RowWeights rule;
    rule.of_logits = p.source == ops::RowSource::logits;
    const RowExtent extent = row.extent(unit);
    if (status_of(extent, p.result, rule.of_logits) != ops::RowStatus::ok) return;
    rule.set(extent.highest, factor_of(p, row.row));
    const RowLimits limits = limits_of(p, row.row);
    const RowRange range = row.range(limits);
    if (range.plan == RowPlan::rest) return;
    const bool is_all = range.plan == RowPlan::all;
    const float least = is_all ? limits.min_p * (rule.of_logits ? 1.0f : rule.highest) : 0.0f;
    RowBlock<Unit> block(unit, shared.exchange);
    weigh(block, row, rule, range, least);
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void weigh(RowBlock<Unit>& block, const SplitRow& row,
                                    const RowWeights& rule, const RowRange& range, float least) {
    Unit& unit = block.unit();
    float x[SplitRow::kOfThread];
    row.load(unit, NAN, x);
    WarpSums sums{};
    if (range.plan != RowPlan::all) list(block, row, range, x, sums);
    if (range.plan != RowPlan::few) add(block, rule, range, least, x, sums);
    if (unit.lane == 0) row.warps()[row.part * kRowWarps + unit.warp] = sums;
  }

  template <class Unit>
  EFFINFER_DEVICE static void add(RowBlock<Unit>& block, const RowWeights& rule,
                                  const RowRange& range, float least,
                                  const float (&x)[SplitRow::kOfThread], WarpSums& sums) {
    const bool shares = range.plan == RowPlan::share;
    // Without a range all values are above it.
    const float high = shares ? range.high : -INFINITY;
    double kept[2] = {};
    double total[2] = {};
    EFFINFER_UNROLL
    for (int i = 0; i < SplitRow::kOfThread; ++i) {
      float weight = rule.exact(block.unit(), x[i]);
      if (!(weight >= least)) weight = 0.0f;  // or is no value's
      const auto amount = static_cast<double>(weight);
      if (x[i] > high) kept[i % 2] += amount;
      if (shares) total[i % 2] += amount;
    }
    sums.kept = block.warp_sum(kept[0] + kept[1]);
    if (shares) sums.total = block.warp_sum(total[0] + total[1]);
  }

  template <class Unit>
  EFFINFER_DEVICE static void list(RowBlock<Unit>& block, const SplitRow& row,
                                   const RowRange& range, const float (&x)[SplitRow::kOfThread],
                                   WarpSums& sums) {
    constexpr int kPer = RowValues::kPerLane;
    Unit& unit = block.unit();
    uint32_t places[SplitRow::kChunks];  // in the warp's entries
    const auto is_in = [&](float value) { return value >= range.low && value <= range.high; };
    EFFINFER_UNROLL
    for (int i = 0; i < SplitRow::kChunks; ++i) {
      bool in[kPer];
      EFFINFER_UNROLL
      for (int e = 0; e < kPer; ++e) in[e] = is_in(x[i * kPer + e]);
      int before = 0;
      const int count = block.count_in(in, before);
      places[i] = static_cast<uint32_t>(sums.listed + before);
      sums.listed += count;
    }
    if (sums.listed == 0) return;
    if (unit.lane == 0) sums.first = unit.atomic_add(&row.state().listed, sums.listed);
    sums.first = unit.shfl(sums.first, 0);
    if (sums.first + sums.listed > RowList::kMost) return;
    EFFINFER_UNROLL
    for (int i = 0; i < SplitRow::kChunks; ++i) {
      int place = sums.first + static_cast<int>(places[i]);
      EFFINFER_UNROLL
      for (int e = 0; e < kPer; ++e) {
        if (!is_in(x[i * kPer + e])) continue;
        row.list_values()[place] = x[i * kPer + e];
        row.list_ids()[place] = row.first(unit, i) + e;
        ++place;
      }
    }
  }
};

}  // namespace effinfer::cuda
