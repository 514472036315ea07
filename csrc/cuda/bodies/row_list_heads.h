// Where heads of a row end whose candidates lie in a list in shared memory, and the row's filters
// where the list has all that they may keep.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_block.h"
#include "cuda/bodies/row_search.h"
#include "cuda/bodies/row_values.h"
#include "cuda/bodies/row_weights.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// A row's filters, off where they keep everything.
struct RowLimits {
  int top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  bool joint = false;
};

// What is known of the end of a row's filters before all of it is looked at.
enum class RowPlan : int32_t {
  rest,  // nothing
  all,   // no filter but min-p, which looks at a weight alone
  few,   // the highest values: the list has all that may be kept
  share  // of the weight: the list has where it ends
};

struct RowKnown {
  RowPlan plan;
  int32_t listed;  // entries of the list
  double above;    // weights above its range
  double total;
};

template <class Unit>
class RowListHeads {
 public:
  // `found` is shared memory; `rule`, `extent` and `limits` outlive this.
  EFFINFER_DEVICE RowListHeads(RowBlock<Unit>& block, RowList& list, int32_t& found,
                               const RowWeights& rule, int size, const RowExtent& extent,
                               const RowLimits& limits)
      : block_(block),
        list_(list),
        found_(found),
        rule_(rule),
        extent_(extent),
        limits_(limits),
        size_(size) {}

  // Whether all that may be kept lies in the list; else only values() and weights() say it.
  EFFINFER_DEVICE bool listed() const { return listed_ >= 0; }
  EFFINFER_DEVICE int list_size() const { return listed_; }
  EFFINFER_DEVICE const RowHead& values() const { return values_; }
  EFFINFER_DEVICE const RowHead& weights() const { return weights_; }
  EFFINFER_DEVICE double total() const { return total_; }
  // Whether sums are so near a bound that another order could decide otherwise.
  EFFINFER_DEVICE bool undecided() const { return undecided_; }

  // What the order of additions may change of a sum of weights: the longest chains of the CPU add
  // the sums of all blocks of 256, and those of a block.
  EFFINFER_DEVICE double slack(double total) const {
    return (size_ / 256 + 1024) * 0x1p-52 * total;
  }

 protected:
  EFFINFER_DEVICE bool of_logits() const { return rule_.of_logits; }
  EFFINFER_DEVICE uint32_t highest_key() const { return key_of(extent_.highest); }
  // The weight of the highest value.
  EFFINFER_DEVICE float heaviest() const { return of_logits() ? 1.0f : extent_.highest; }

  EFFINFER_DEVICE int32_t list_ties(const HeadEnd& end) {
    return RowList::ties_end(block_, list_.values, listed_ >= 0 ? listed_ : in_list_, end, found_,
                             [&](int place) { return list_.ids[place]; });
  }

  // The head of the weights in the list that follow an amount of `above`.
  template <bool kWeights>
  EFFINFER_DEVICE RowHead list_head(double goal, double above) {
    const int size = listed_ >= 0 ? listed_ : in_list_;
    const HeadEnd end = list_.template end_of_head<kWeights>(
        block_, size, goal - above, {key_of(kWeights ? 0x1p-149f : 0.0f), key_of(heaviest())});
    if constexpr (kWeights) note_end(end, goal - above, total_);
    return {end.least, list_ties(end)};
  }

  EFFINFER_DEVICE void note_distance(double distance, double total) {
    undecided_ = undecided_ || fabs(distance) <= slack(total);
  }
  // The goal must be away from the sums that any number of the equal tokens complete.
  EFFINFER_DEVICE void note_end(const HeadEnd& end, double goal, double total) {
    const auto least = static_cast<double>(end.least);
    const double steps = (goal - end.above) / least;
    note_distance((steps - rint(steps)) * least, total);
    undecided_ = undecided_ || steps < 0.0 || steps > end.equal;
  }

  // Top-k of the values in the list.
  EFFINFER_DEVICE void keep_listed_values() {
    const int size = listed_ >= 0 ? listed_ : in_list_;
    const HeadEnd end = list_.template end_of_head<false>(block_, size, limits_.top_k,
                                                          {key_of(-INFINITY), highest_key()});
    values_ = {end.least, list_ties(end)};
  }

  // The list's values become weights, 0 where they are kept no longer; their sum. An entry is
  // always the same thread's from here to keep_listed().
  EFFINFER_DEVICE double weigh_listed(int size) {
    double sums[1] = {};
    RowList::visit(block_.unit(), size, [&](int i) {
      const float x = list_.values[i];
      const float weight = values_.has(x, list_.ids[i]) ? rule_.exact(block_.unit(), x) : 0.0f;
      list_.values[i] = weight;
      sums[0] += static_cast<double>(weight);
    });
    block_.sum(sums, RowList::warps_of(size));
    return sums[0];
  }
  // Top-p, where the list has all weights that follow an amount of `above`, or all that are left.
  EFFINFER_DEVICE void keep_listed_share(double goal, double above, double listed) {
    note_distance(goal - above - listed, total_);
    if (goal < above + listed) weights_ = list_head<true>(goal, above);
  }
  // Weights that are not kept become 0; the sum of others.
  EFFINFER_DEVICE double keep_listed(int size) {
    double sums[1] = {};
    RowList::visit(block_.unit(), size, [&](int i) {
      if (!weights_.has(list_.values[i], list_.ids[i])) list_.values[i] = 0.0f;
      sums[0] += static_cast<double>(list_.values[i]);
    });
    block_.sum(sums, RowList::warps_of(size));
    return sums[0];
  }

  EFFINFER_DEVICE void keep_min_p() {
    const float least = limits_.min_p * heaviest();
    if (limits_.min_p > 0.0f && least > weights_.least) weights_ = {least, INT32_MAX};
  }

  RowBlock<Unit>& block_;
  RowList& list_;
  int32_t& found_;
  const RowWeights& rule_;
  const RowExtent& extent_;
  const RowLimits& limits_;
  RowHead values_;
  RowHead weights_;
  int size_;
  int listed_ = -1;  // entries of the list that has all
  int in_list_ = 0;  // of one that has the range of an end
  double total_ = 0.0;
  bool undecided_ = false;
};

}  // namespace effinfer::cuda
