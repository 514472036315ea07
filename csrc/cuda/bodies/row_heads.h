// Where heads of a row end: of values that are the highest, of weights that have a share. By way of
// a list in shared memory wherever one is long enough:
//
//   the row fits, or top-k leaves few tokens: these are the list, and the row is not read again
//   else: rounds with rough weights (or counts) find a range of values that holds the head's end
//   and
//         fits into the list; a pass adds exact weights above it, and the list tells the end
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_list_heads.h"
#include "cuda/bodies/row_passes.h"

namespace effinfer::cuda {

// What the filters of a row have in shared memory.
struct RowFilterShared {
  RowParts parts;
  RowList list;
  RowKnown known;
  int32_t found;
};

template <class Values, class Unit>
class RowHeads : public RowListHeads<Unit> {
 public:
  using Base = RowListHeads<Unit>;
  using Passes = RowPasses<Values, Unit>;

  EFFINFER_DEVICE RowHeads(RowBlock<Unit>& block, Passes& passes, RowFilterShared& shared,
                           const RowExtent& extent, const RowLimits& limits)
      : Base(block, shared.list, shared.found, passes.weights(), passes.values().size, extent,
             limits),
        passes_(passes),
        shared_(shared) {}

 protected:
  using Base::block_;
  using Base::extent_;
  using Base::in_list_;
  using Base::limits_;
  using Base::size_;
  using Base::total_;
  using Base::values_;
  using Base::weights_;

  EFFINFER_DEVICE float margin_at(float value) const { return passes_.weights().margin_at(value); }

  // The head of the `goal` highest values.
  EFFINFER_DEVICE RowHead value_head(int goal) {
    KeyRange range{key_of(-INFINITY), this->highest_key()};
    int from_low = size_;
    int from_above = 0;
    while (!range.is_one() && from_low - from_above > RowList::kMost) {
      float pivots[kPivots];
      int counts[kPivots];
      pivots_between(range, pivots, false);
      passes_.above_pivots(pivots, counts);
      EFFINFER_UNROLL
      for (int j = 0; j < kPivots; ++j) {
        const KeyRange old = range;
        const bool reached = counts[j] >= goal;
        range.tell(key_of(pivots[j]), reached, !reached);
        if (range.low != old.low) from_low = counts[j];
        if (range.high != old.high) from_above = counts[j];
      }
    }
    if (range.is_one() && from_low - from_above > RowList::kMost) {
      const float least = value_of(range.low);
      const int needed = goal - from_above;
      if (needed >= from_low - from_above) return {least, INT32_MAX};
      return {least, passes_.template after_equal<false>(RowHead{}, least, needed, shared_.found)};
    }
    in_list_ = passes_.count(value_of(range.low), value_of(range.high));
    passes_.write(value_of(range.low), value_of(range.high), shared_.list);
    const HeadEnd end =
        shared_.list.template end_of_head<false>(block_, in_list_, goal - from_above, range);
    return {end.least, this->list_ties(end)};
  }

  // Logits are spread evenly over their range, weights over its octaves; a pivot halves the range
  // in the order of floats, so that it always ends, but for logits that are `near`: those whose
  // weights matter are no further apart than some ten temperatures.
  EFFINFER_DEVICE void pivots_between(const KeyRange& range, float (&pivots)[kPivots],
                                      bool near) const {
    const float low = value_of(range.low);
    const float high = value_of(range.high);
    EFFINFER_UNROLL
    for (int j = 0; j < kPivots; ++j) {
      pivots[j] = value_of(range.pivot(j));
      const float even = low + (high - low) * (static_cast<float>(j + 1) / (kPivots + 1));
      if (this->of_logits() && (near || j != 1) && even > low && even <= high) pivots[j] = even;
    }
  }

  // Top-p by way of the list, which has its end already or gets it; false where it has not.
  EFFINFER_DEVICE bool weigh_head(bool is_known = false) {
    RowKnown share;
    if (is_known) {
      share = shared_.known;
    } else if (!list_share(share)) {
      return false;
    }
    total_ = share.total;
    in_list_ = share.listed;
    const double inside = this->weigh_listed(in_list_);
    const double goal = static_cast<double>(limits_.top_p) * total_;
    if (share.above >= goal || share.above + inside < goal) return false;
    weights_ = this->template list_head<true>(goal, share.above);
    if (!is_known) add_listed();
    return true;
  }

  // False where equal values, or a part of those at the end of top-k, are too many for the list.
  EFFINFER_DEVICE bool list_share(RowKnown& share) {
    if (values_.ties_end != INT32_MAX) return false;
    KeyRange range{key_of(values_.least), this->highest_key()};
    int from_low = INT32_MAX;
    int from_above = 0;
    double mass = 0.0;
    if (!narrow_by_weight(limits_.top_p, range, from_low, from_above, mass)) return false;
    const float low = fmaxf(value_of(range.low) - margin_at(value_of(range.low)), values_.least);
    const float high = value_of(range.high) + margin_at(value_of(range.high));
    const auto sums = passes_.sums(values_.least, low, high);
    if (sums.count > RowList::kMost) return false;
    passes_.write(low, high, shared_.list);
    share = {RowPlan::share, sums.count, sums.above, sums.total};
    return true;
  }

  // What the list keeps joins the sums of the parts that its tokens are in.
  EFFINFER_DEVICE void add_listed() {
    Unit& unit = block_.unit();
    int begin = 0;
    for (int w = 0; w < unit.warp; ++w) begin += shared_.parts.count[w];
    double mine = 0.0;
    for (int i = unit.lane; i < shared_.parts.count[unit.warp]; i += kWarp) {
      const float weight = shared_.list.values[begin + i];
      if (weights_.has(weight, shared_.list.ids[begin + i])) mine += static_cast<double>(weight);
    }
    mine = block_.warp_sum(mine);
    if (unit.lane == 0) shared_.parts.head[unit.warp] += mine;
    unit.sync();
    total_ = 0.0;
    for (int w = 0; w < kRowWarps; ++w) total_ += shared_.parts.head[w];
  }

  // Rounds with rough weights, until the range fits into the list.
  EFFINFER_DEVICE bool narrow_by_weight(float p, KeyRange& range, int& from_low, int& from_above,
                                        double& mass) {
    constexpr double kRough = 0x1p-11;
    float pivots[kPivots];
    int counts[kPivots];
    double amounts[kPivots];
    first_pivots(range, pivots);
    for (;;) {
      passes_.above_pivots(pivots, counts, amounts);
      if (mass == 0.0) {
        mass = amounts[0];
        from_low = counts[0];
        raise_low(p, mass, range);
      }
      const double goal = static_cast<double>(p) * mass;
      const KeyRange old = range;
      EFFINFER_UNROLL
      for (int j = 0; j < kPivots; ++j) {
        const KeyRange before = range;
        range.tell(key_of(pivots[j]), amounts[j] >= goal * (1.0 + kRough),
                   amounts[j] <= goal * (1.0 - kRough));
        if (range.low != before.low) from_low = counts[j];
        if (range.high != before.high) from_above = counts[j];
      }
      // The margins add some.
      if (from_low - from_above <= RowList::kMost * 7 / 8) return true;
      if (range.is_one() || (range.low == old.low && range.high == old.high)) return false;
      pivots_between(range, pivots, true);
    }
  }

  // All that there is, and what weighs at least an eighth, or a 64th, of the heaviest.
  EFFINFER_DEVICE void first_pivots(const KeyRange& range, float (&pivots)[kPivots]) const {
    pivots[0] = value_of(range.low);
    EFFINFER_UNROLL
    for (int j = 1; j < kPivots; ++j) {
      const float octaves = static_cast<float>(3 * j);
      if (this->of_logits()) {
        pivots[j] = extent_.highest - octaves * 0.693147181f / passes_.weights().factor;
      } else {
        pivots[j] = extent_.highest * exp2f(-octaves);
      }
      pivots[j] = fmaxf(pivots[j], pivots[0]);
    }
  }

  // What is below (1 - p) / n of the weight weighs less than 1 - p together.
  EFFINFER_DEVICE void raise_low(float p, double mass, KeyRange& range) const {
    const double share = 0.5 * (1.0 - static_cast<double>(p)) * mass / size_;
    float least = static_cast<float>(share);
    if (this->of_logits()) {
      least = extent_.highest + logf(least) / passes_.weights().factor;
      least -= margin_at(least);
    }
    if (least > value_of(range.low) && least <= value_of(range.high)) range.low = key_of(least);
  }

  // The same by exact weights and passes alone.
  EFFINFER_DEVICE void weigh_head_exactly() {
    total_ = passes_.sum(values_, weights_);
    const double goal = static_cast<double>(limits_.top_p) * total_;
    const HeadEnd end = passes_.template end_of_head<true>(
        values_, goal, {key_of(0x1p-149f), key_of(this->heaviest())});
    this->note_end(end, goal, total_);
    weights_ = {end.least, INT32_MAX};
    if (end.needed < end.equal) {
      weights_.ties_end =
          passes_.template after_equal<true>(values_, end.least, end.needed, shared_.found);
    }
    total_ = passes_.sum(values_, weights_);
  }

  Passes& passes_;
  RowFilterShared& shared_;
};

}  // namespace effinfer::cuda
