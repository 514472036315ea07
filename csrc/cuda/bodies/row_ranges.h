// The range of values in which a row's filter ends, for rows that are split: of the highest values
// by the maxima of groups, of a share of the weight by a histogram of weights.
//
// The histogram is by octaves of weight, of 32 bins each. A bin counts its values and adds up how
// far they are from its upper end, in 32 steps, so that its weight is known but for some 2^-12 of
// it. These are integers, whose sums have no order.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/split_rows.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// Which bin a value is in, from the highest values on: of logits by their distance to the highest
// one, of weights by the bits of theirs.
struct WeightBins {
  static constexpr int kBins = ops::SamplingScratch::kBins;
  static constexpr int kOctave = 32;  // bins
  static constexpr int kSteps = 32;   // of a bin
  // A bin's number in shared memory: steps, and above them values, of which a part has 2^13.
  static constexpr int kCountBit = 18;
  static_assert((kSteps - 1) * SplitRow::kPart < 1 << kCountBit);
  static_assert(SplitRow::kPart < 1 << (32 - kCountBit));
  static constexpr int kCountBitOfRow = 32;
  static constexpr int kDropped = 23 - 10;  // bits of a weight below a step

  bool of_logits;
  float highest;
  float rate;    // octaves of a logit
  uint32_t end;  // bits of the power of two above the highest weight

  EFFINFER_DEVICE static WeightBins of(const RowWeights& rule, float highest) {
    return {rule.of_logits, highest, rule.rate, ((bits_of(highest) >> 23) + 1) << 23};
  }
  // Whether bins are even: of weights down to denormal ones they are not.
  EFFINFER_DEVICE bool fits() const { return of_logits || highest > 0x1p-80f; }

  // The steps from the upper end of the first bin to values: kEnd or more from the last bin on.
  static constexpr uint32_t kEnd = kBins * kSteps;
  template <int kCount>
  EFFINFER_DEVICE void steps_of(const float (&x)[kCount], uint32_t (&steps)[kCount]) const {
    if (!of_logits) {
      EFFINFER_UNROLL
      for (int i = 0; i < kCount; ++i) steps[i] = (end - 1 - bits_of(x[i])) >> kDropped;
      return;
    }
    constexpr float kRound = 8388608.0f;  // 2^23: rounds to integers what is added to it
    EFFINFER_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const float exact = (highest - x[i]) * rate * static_cast<float>(kOctave * kSteps);
      const uint32_t rounded = bits_of(exact + kRound) - bits_of(kRound);
      steps[i] = exact < static_cast<float>(kEnd) ? rounded : kEnd;  // a NaN is not less
    }
  }
  // The weight of a bin's values, as a share of its octaves' upper end.
  template <class Unit>
  EFFINFER_DEVICE double weight(Unit& unit, int bin, uint32_t count, uint32_t steps) const {
    const auto values = static_cast<double>(count);
    const auto below = static_cast<double>(steps);
    if (of_logits) {
      // The chord of a power of two over a bin.
      constexpr double kSlope = 0.021427938;  // 1 - 2^(-1 / 32)
      const float power = unit.exp2(static_cast<float>(bin) * (-1.0f / kOctave));
      return static_cast<double>(power) * (values - below * (kSlope / kSteps));
    }
    const float power = unit.exp2(static_cast<float>(-(bin / kOctave)));
    const double lower = values * (static_cast<double>(bin % kOctave) / (2 * kOctave)) +
                         (below + 0.5 * values) / (2 * kOctave * kSteps);
    return static_cast<double>(power) * (values - lower);
  }
  // No value of a bin is above or below these; those of others may be as well.
  EFFINFER_DEVICE float upper(const RowWeights& rule, int bin) const {
    if (!of_logits) return float_of(end - 1 - (static_cast<uint32_t>(bin) << (kDropped + 5)));
    const float value = highest - (static_cast<float>(bin * kSteps) - 1.0f) / steps_of_one();
    return value + rule.margin_at(value);
  }
  EFFINFER_DEVICE float lower(const RowWeights& rule, int bin) const {
    if (!of_logits) return float_of(end - (static_cast<uint32_t>(bin + 1) << (kDropped + 5)));
    const float value = highest - static_cast<float>((bin + 1) * kSteps) / steps_of_one();
    return value - rule.margin_at(value);
  }

 private:
  EFFINFER_DEVICE float steps_of_one() const { return rate * static_cast<float>(kOctave * kSteps); }
};

struct RowRanges {
  static constexpr const char* kName = "row_ranges";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMinBlocks = 3;
  using Params = SplitParams;
  struct Shared {
    RowExchange exchange;
    uint32_t bins[WeightBins::kBins];
    int32_t first;  // bins where the share may end
    int32_t last;
    int32_t highest;  // none above it
    int32_t flag;
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const SplitRow row(unit, params);
    const ops::RowSamplingProblem& p = params.problem;
    const RowLimits limits = limits_of(p, row.row);
    const RowPlan plan = plan_of(limits, row.parts);
    if (plan == RowPlan::few) {
      if (row.part == 0) bound(unit, row, limits.top_k, shared);
      return;
    }
    if (plan != RowPlan::share) return;
    RowWeights rule;
    rule.of_logits = p.source == ops::RowSource::logits;
    const RowExtent extent = row.extent(unit);
    if (status_of(extent, p.result, rule.of_logits) != ops::RowStatus::ok) return;
    rule.set(extent.highest, factor_of(p, row.row));
    const WeightBins bins = WeightBins::of(rule, extent.highest);
    if (!bins.fits()) return;
    count(unit, row, bins, shared.bins);
    if (row.ends_row(unit, shared.flag)) find(unit, row, limits, rule, bins, shared);
  }

 private:
  // What the sums of bins are off: hardly ever more than the one, never more than the other. Where
  // they are, the list turns out to lack the end.
  static constexpr double kRough = 0x1p-12;
  static constexpr double kMost = 0x1p-10;

  // As many groups' maxima as top-k wants values, or a few more, are not below it.
  template <class Unit>
  EFFINFER_DEVICE static void bound(Unit& unit, const SplitRow& row, int top_k, Shared& shared) {
    RowBlock<Unit> block(unit, shared.exchange);
    const float least = RowList::bound_of_head(block, row.maxima(), row.parts * SplitRow::kGroups,
                                               top_k, top_k + top_k / 4 + 16);
    if (unit.thread != 0) return;
    SplitState& state = row.state();
    state.low = least;
    state.plan = RowPlan::few;
  }

  template <class Unit>
  EFFINFER_DEVICE static void count(Unit& unit, const SplitRow& row, const WeightBins& bins,
                                    uint32_t (&counts)[WeightBins::kBins]) {
    float x[SplitRow::kOfThread];
    row.load(unit, NAN, x);
    for (int i = unit.thread; i < WeightBins::kBins; i += kThreads) counts[i] = 0;
    unit.sync();
    uint32_t steps[SplitRow::kOfThread];
    bins.steps_of(x, steps);
    EFFINFER_UNROLL
    for (const uint32_t step : steps) {
      if (step >= WeightBins::kEnd) continue;
      unit.add_shared(&counts[step / WeightBins::kSteps],
                      (1u << WeightBins::kCountBit) + step % WeightBins::kSteps);
    }
    unit.sync();
    for (int i = unit.thread; i < WeightBins::kBins; i += kThreads) {
      const uint32_t word = counts[i];
      if (word == 0) continue;
      const uint64_t values = word >> WeightBins::kCountBit;
      const uint64_t below = word & ((1u << WeightBins::kCountBit) - 1);
      unit.add_global(&row.bins()[i], (values << WeightBins::kCountBitOfRow) + below);
    }
  }

  // The bins where the share may end.
  template <class Unit>
  EFFINFER_DEVICE static void find(Unit& unit, const SplitRow& row, const RowLimits& limits,
                                   const RowWeights& rule, const WeightBins& bins, Shared& shared) {
    constexpr int kOwn = WeightBins::kBins / kThreads;
    RowBlock<Unit> block(unit, shared.exchange);
    double weights[kOwn];
    double mine = 0.0;
    EFFINFER_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int bin = unit.thread * kOwn + i;
      const uint64_t word = row.bins()[bin];
      weights[i] = bins.weight(unit, bin, static_cast<uint32_t>(word >> WeightBins::kCountBitOfRow),
                               static_cast<uint32_t>(word));
      mine += weights[i];
    }
    if (unit.thread == 0) shared.first = shared.last = shared.highest = -1;
    double mass = 0.0;
    double above = block.prefix(mine, mass);
    const double goal = static_cast<double>(limits.top_p) * mass;
    EFFINFER_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const double next = above + weights[i];
      const auto ends = [&](double at) { return above < at && at <= next; };
      if (ends(goal * (1.0 - kRough))) shared.first = unit.thread * kOwn + i;
      if (ends(goal * (1.0 - kMost))) shared.highest = unit.thread * kOwn + i;
      if (ends(goal * (1.0 + kRough))) shared.last = unit.thread * kOwn + i;
      above = next;
    }
    unit.sync();
    const bool found = shared.first >= 0 && shared.last >= 0 && shared.highest >= 0;
    if (unit.thread != 0 || !found) return;
    SplitState& state = row.state();
    state.low = bins.lower(rule, shared.last);
    state.high = bins.upper(rule, shared.first);
    state.plan =
        plan_with(limits.min_p * (rule.of_logits ? 1.0f : rule.highest),
                  rule.exact(unit, bins.upper(rule, shared.highest)), rule.exact(unit, state.high));
  }

  // Where min-p keeps less than what is certainly above the end, top-p keeps all of that; what is
  // above the range must be kept by min-p.
  EFFINFER_DEVICE static RowPlan plan_with(float least, float highest, float high) {
    if (least > highest * (1.0f + 0x1p-10f)) return RowPlan::all;
    return least <= high * (1.0f - 0x1p-10f) ? RowPlan::share : RowPlan::rest;
  }
};

}  // namespace effinfer::cuda
