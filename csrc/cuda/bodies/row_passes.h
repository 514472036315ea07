// What filters ask of a row that is too long for shared memory. A pass reads it once, from the L2
// but for the first one: 64 rows of 128k float32 are 32 MB.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_block.h"
#include "cuda/bodies/row_search.h"
#include "cuda/bodies/row_values.h"
#include "cuda/bodies/row_weights.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

template <class Values, class Unit>
class RowPasses {
 public:
  static constexpr int kPerLane = Values::kPerLane;

  EFFINFER_DEVICE RowPasses(RowBlock<Unit>& block, const Values& values, RowParts& parts,
                            bool of_logits)
      : block_(block), values_(values), parts_(parts) {
    weights_.of_logits = of_logits;
  }

  // Of logits: the highest one, and the inverse of the temperature.
  EFFINFER_DEVICE void set_weights(float highest, float factor) { weights_.set(highest, factor); }

  EFFINFER_DEVICE RowExtent extent() {
    float highest = -INFINITY;
    float lowest = INFINITY;
    bool nan = false;
    double sums[4] = {};
    visit(weights_.of_logits ? -INFINITY : 0.0f, [&](const float (&x)[kPerLane], int) {
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) {
        nan = nan || x[e] != x[e];
        highest = fmaxf(highest, x[e]);
        if (!weights_.of_logits) {
          lowest = fminf(lowest, x[e]);
          sums[e % 4] += static_cast<double>(x[e]);
        }
      }
    });
    RowExtent extent{highest, highest, lowest, false, 0.0};
    // As integers, which maxima of the block are: the sign bit flipped.
    int keys[3] = {static_cast<int>(key_of(highest) ^ 0x80000000u),
                   static_cast<int>(~key_of(lowest) ^ 0x80000000u), nan ? 1 : 0};
    block_.max(keys);
    extent.highest = value_of(static_cast<uint32_t>(keys[0]) ^ 0x80000000u);
    extent.lowest = value_of(~(static_cast<uint32_t>(keys[1]) ^ 0x80000000u));
    extent.has_nan = keys[2] != 0;
    if (!weights_.of_logits) {
      extent.total = share_parts((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    return extent;
  }

  // The number of values in a range, by parts too.
  EFFINFER_DEVICE int count(float low, float high) {
    int mine = 0;
    visit(NAN, [&](const float (&x)[kPerLane], int) {
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) mine += x[e] >= low && x[e] <= high ? 1 : 0;
    });
    return share_counts(mine);
  }

  // The values in a range, which fit, and their tokens, in order; count() or sums() came before.
  EFFINFER_DEVICE void write(float low, float high, RowList& list) {
    Unit& unit = block_.unit();
    int at = 0;
    for (int w = 0; w < unit.warp; ++w) at += parts_.count[w];
    visit(NAN, [&](const float (&x)[kPerLane], int first) {
      bool in[kPerLane];
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) in[e] = x[e] >= low && x[e] <= high;
      int before = 0;
      const int count = block_.count_in(in, before);
      int place = at + before;
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) {
        if (!in[e]) continue;
        list.values[place] = x[e];
        list.ids[place] = first + e;
        ++place;
      }
      at += count;
    });
    unit.sync();
  }

  // Of what is not below each pivot: its number, and about its weight. As numbers that are 1 or 0
  // comparisons take an instruction less each than as predicates, and numbers of a thread are exact
  // as float32.
  EFFINFER_DEVICE void above_pivots(const float (&pivots)[kPivots], int (&counts)[kPivots],
                                    double (&amounts)[kPivots]) {
    float numbers[kPivots] = {};
    float sums[kPivots] = {};
    visit(NAN, [&](const float (&x)[kPerLane], int) {
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) {
        // A NaN, which fills a row up, is below all pivots, and weighs 0 or 1.
        const float weight = fminf(weights_.about(block_.unit(), x[e]), 3.40282347e38f);
        EFFINFER_UNROLL
        for (int j = 0; j < kPivots; ++j) {
          const float in = x[e] >= pivots[j] ? 1.0f : 0.0f;
          numbers[j] += in;
          sums[j] = fmaf(in, weight, sums[j]);
        }
      }
    });
    EFFINFER_UNROLL
    for (int j = 0; j < kPivots; ++j) {
      counts[j] = static_cast<int>(numbers[j]);
      amounts[j] = static_cast<double>(sums[j]);
    }
    block_.sum(counts);
    block_.sum(amounts);
  }
  EFFINFER_DEVICE void above_pivots(const float (&pivots)[kPivots], int (&counts)[kPivots]) {
    EFFINFER_UNROLL
    for (int j = 0; j < kPivots; ++j) counts[j] = 0;
    visit(NAN, [&](const float (&x)[kPerLane], int) {
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) {
        EFFINFER_UNROLL
        for (int j = 0; j < kPivots; ++j) counts[j] += x[e] >= pivots[j] ? 1 : 0;
      }
    });
    block_.sum(counts);
  }

  // Exact weights: of all values from `floor` on, and of those above a range, by parts too; how
  // many are in it, by parts as well.
  struct Sums {
    double total;
    double above;
    int count;
  };
  EFFINFER_DEVICE Sums sums(float floor, float low, float high) {
    double total[2] = {};
    double above[2] = {};
    int mine = 0;
    visit(NAN, [&](const float (&x)[kPerLane], int) {
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) {
        const auto weight = static_cast<double>(weights_.exact(block_.unit(), x[e]));
        if (x[e] >= floor) total[e % 2] += weight;
        if (x[e] > high) above[e % 2] += weight;
        if (x[e] >= low && x[e] <= high) ++mine;
      }
    });
    double all[1] = {total[0] + total[1]};
    block_.sum(all);
    const int count = share_counts(mine);
    return {all[0], share_parts(above[0] + above[1]), count};
  }

  // The weight of a token after both heads: of values and of weights.
  EFFINFER_DEVICE float weight(float x, int index, const RowHead& values,
                               const RowHead& weights) const {
    if (!values.has(x, index)) return 0.0f;
    const float weight = weights_.exact(block_.unit(), x);
    return weights.has(weight, index) ? weight : 0.0f;
  }
  // The sum of all, by parts too, which everybody has read.
  EFFINFER_DEVICE double sum(const RowHead& values, const RowHead& weights) {
    block_.unit().sync();
    double sums[4] = {};
    visit(NAN, [&](const float (&x)[kPerLane], int first) {
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) {
        sums[e % 4] += static_cast<double>(weight(x[e], first + e, values, weights));
      }
    });
    return share_parts((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  EFFINFER_DEVICE double sum() {
    double sums[4] = {};
    visit(NAN, [&](const float (&x)[kPerLane], int) {
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) {
        sums[e % 4] += static_cast<double>(weights_.exact(block_.unit(), x[e]));
      }
    });
    return share_parts((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  // The end of the head with an amount of `goal` in the order of exact weights, of tokens in the
  // head `within`, by passes alone.
  template <bool kWeights>
  EFFINFER_DEVICE HeadEnd end_of_head(const RowHead& within, double goal, KeyRange range) {
    const auto amounts_of = [&](auto&& counts) {
      double amounts[kPivots] = {};
      visit(NAN, [&](const float (&x)[kPerLane], int first) {
        EFFINFER_UNROLL
        for (int e = 0; e < kPerLane; ++e) {
          if (!within.has(x[e], first + e)) continue;
          const float weight = weights_.exact(block_.unit(), x[e]);
          const double amount = kWeights ? static_cast<double>(weight) : 1.0;
          EFFINFER_UNROLL
          for (int j = 0; j < kPivots; ++j) amounts[j] += counts(j, weight) ? amount : 0.0;
        }
      });
      block_.sum(amounts);
      EFFINFER_UNROLL
      for (int j = 0; j < kPivots; ++j) amounts_[j] = amounts[j];
    };
    while (!range.is_one()) {
      const KeyRange old = range;
      amounts_of([&](int j, float weight) { return weight >= value_of(old.pivot(j)); });
      EFFINFER_UNROLL
      for (int j = 0; j < kPivots; ++j) {
        range.tell(old.pivot(j), amounts_[j] >= goal, !(amounts_[j] >= goal));
      }
    }
    const float least = value_of(range.low);
    amounts_of([&](int j, float weight) { return j == 0 ? weight > least : weight == least; });
    const double one = kWeights && least > 0.0f ? static_cast<double>(least) : 1.0;
    return head_end<kWeights>(least, amounts_[0], static_cast<int>(amounts_[1] / one + 0.5), goal);
  }

  // The index behind the `needed`-th token whose value, or weight, is `least`, in the head
  // `within`.
  template <bool kWeights>
  EFFINFER_DEVICE int after_equal(const RowHead& within, float least, int needed, int32_t& found) {
    Unit& unit = block_.unit();
    const auto equals = [&](int tile, auto&& each) {
      float x[kPerLane];
      const int first = (tile * kRowThreads + unit.thread) * kPerLane;
      values_.load(unit, first, NAN, x);
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) {
        if (!within.has(x[e], first + e)) continue;
        if ((kWeights ? weights_.exact(unit, x[e]) : x[e]) == least) each(first + e);
      }
    };
    pick_nth(
        block_, needed,
        [&](int tile) {
          int mine = 0;
          equals(tile, [&](int) { ++mine; });
          return mine;
        },
        [&](int tile, int which) {
          equals(tile, [&](int index) {
            if (--which == 0) found = index + 1;
          });
        });
    unit.sync();
    return found;
  }

  template <class Visit>
  EFFINFER_DEVICE void visit(float fill, Visit&& each) {
    values_.visit(block_.unit(), fill, each);
  }

  EFFINFER_DEVICE Unit& unit() { return block_.unit(); }
  EFFINFER_DEVICE const Values& values() const { return values_; }
  EFFINFER_DEVICE const RowWeights& weights() const { return weights_; }

 private:
  EFFINFER_DEVICE double share_parts(double mine) {
    Unit& unit = block_.unit();
    mine = block_.warp_sum(mine);
    if (unit.lane == 0) parts_.head[unit.warp] = mine;
    unit.sync();
    double total = 0.0;
    for (int w = 0; w < kRowWarps; ++w) total += parts_.head[w];
    return total;
  }
  // Between two calls lies a barrier: of write(), above_pivots() or sums().
  EFFINFER_DEVICE int share_counts(int mine) {
    Unit& unit = block_.unit();
    mine = block_.warp_sum(mine);
    if (unit.lane == 0) parts_.count[unit.warp] = mine;
    unit.sync();
    int total = 0;
    for (int w = 0; w < kRowWarps; ++w) total += parts_.count[w];
    return total;
  }

  RowBlock<Unit>& block_;
  const Values& values_;
  RowParts& parts_;
  RowWeights weights_;
  double amounts_[kPivots];
};

}  // namespace effinfer::cuda
