// The filters of a row, one after the other.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_heads.h"

namespace effinfer::cuda {

template <class Values, class Unit>
class RowFilters : public RowHeads<Values, Unit> {
 public:
  using Base = RowHeads<Values, Unit>;
  using Base::Base;
  // Maxima of threads bound the k-th highest value well for up to so many.
  static constexpr int kFewest = 384;

  // Whether all that may be kept lies in the list; else only values() and weights() say it.
  EFFINFER_DEVICE bool listed() const { return listed_ >= 0; }
  EFFINFER_DEVICE int list_size() const { return listed_; }
  EFFINFER_DEVICE const RowHead& values() const { return values_; }
  EFFINFER_DEVICE const RowHead& weights() const { return weights_; }
  EFFINFER_DEVICE double total() const { return total_; }
  // Whether sums are so near a bound that another order could decide otherwise.
  EFFINFER_DEVICE bool undecided() const { return undecided_; }

  // Top-k of values, where it comes first. What else there is follows if there are to be weights.
  EFFINFER_DEVICE void keep_values() {
    list_candidates();
    if (limits_.joint || limits_.top_k == 0) return;
    if (listed()) {
      const HeadEnd end = shared_.list.template end_of_head<false>(block_, listed_, limits_.top_k,
                                                                   {key_of(-INFINITY), highest_});
      values_ = {end.least, this->list_ties(end)};
    } else {
      values_ = this->value_head(limits_.top_k);
    }
  }

  EFFINFER_DEVICE void keep_weights() {
    if (listed()) {
      keep_listed();
    } else {
      keep_in_row();
    }
  }

 private:
  using Base::block_;
  using Base::extent_;
  using Base::heaviest_;
  using Base::highest_;
  using Base::limits_;
  using Base::listed_;
  using Base::passes_;
  using Base::shared_;
  using Base::size_;
  using Base::total_;
  using Base::undecided_;
  using Base::values_;
  using Base::weights_;

  EFFINFER_DEVICE void list_candidates() {
    if (size_ <= RowList::kMost) {
      list_range(-INFINITY, INFINITY);
    } else if (limits_.top_k > 0 && limits_.top_k <= kFewest) {
      shared_.list.values[block_.unit().thread] = extent_.mine;
      const HeadEnd end = shared_.list.template end_of_head<false>(
          block_, kRowThreads, limits_.top_k, {key_of(-INFINITY), highest_});
      const float margin = limits_.joint ? this->margin_at(end.least) : 0.0f;
      list_range(end.least - margin, INFINITY);
    }
  }

  // Makes the values in a range the list, if there is room.
  EFFINFER_DEVICE void list_range(float low, float high) {
    const int count = passes_.count(low, high);
    if (count > RowList::kMost) return;
    passes_.write(low, high, shared_.list);
    listed_ = count;
  }

  // --- all in the list -------------------------------------------------------------------------

  EFFINFER_DEVICE void keep_listed() {
    Unit& unit = block_.unit();
    RowList& list = shared_.list;
    const bool is_whole = listed_ == size_;
    double sums[1] = {};
    // An entry is always the same thread's from here to the sum at the end.
    RowList::visit(unit, listed_, [&](int i) {
      const float x = list.values[i];
      const float weight = values_.has(x, list.ids[i]) ? passes_.weights().exact(unit, x) : 0.0f;
      list.values[i] = weight;
      sums[0] += static_cast<double>(weight);
    });
    block_.sum(sums, RowList::warps_of(listed_));
    if (limits_.joint && !is_whole) {
      total_ = this->of_logits() ? passes_.sum() : extent_.total;
    } else {
      total_ = sums[0];
    }
    if (limits_.top_p < 1.0f) {
      const double goal = static_cast<double>(limits_.top_p) * total_;
      this->note_distance(goal - sums[0], total_);
      if (goal < sums[0]) weights_ = this->template list_head<true>(goal, 0.0);
    }
    if (limits_.joint && limits_.top_k > 0) {
      weights_ = shorter(weights_, this->template list_head<false>(limits_.top_k, 0.0));
    }
    keep_min_p();
    double left[1] = {};
    RowList::visit(unit, listed_, [&](int i) {
      if (!weights_.has(list.values[i], list.ids[i])) list.values[i] = 0.0f;
      left[0] += static_cast<double>(list.values[i]);
    });
    block_.sum(left, RowList::warps_of(listed_));
    total_ = left[0];
  }

  EFFINFER_DEVICE void keep_min_p() {
    const float least = limits_.min_p * heaviest_;
    if (limits_.min_p > 0.0f && least > weights_.least) weights_ = {least, INT32_MAX};
  }

  EFFINFER_DEVICE void keep_in_row() {
    if (limits_.top_p < 1.0f) {
      if (!this->weigh_head()) this->weigh_head_exactly();
    } else if (values_.least > -INFINITY || values_.ties_end != INT32_MAX) {
      total_ = passes_.sum(values_, weights_);
    } else {
      total_ = this->of_logits() ? passes_.sum() : extent_.total;
    }
    const RowHead before = weights_;
    if (limits_.joint && limits_.top_k > 0) keep_top_weights();
    keep_min_p();
    if (before.least != weights_.least || before.ties_end != weights_.ties_end) {
      total_ = passes_.sum(values_, weights_);
    }
  }

  EFFINFER_DEVICE void keep_top_weights() {
    if (this->of_logits()) {
      const HeadEnd end = passes_.template end_of_head<false>(values_, limits_.top_k,
                                                              {key_of(0.0f), key_of(heaviest_)});
      RowHead head{end.least, INT32_MAX};
      if (end.needed < end.equal) {
        head.ties_end =
            passes_.template after_equal<true>(values_, end.least, end.needed, shared_.found);
      }
      weights_ = shorter(weights_, head);
    } else {
      weights_ = shorter(weights_, this->value_head(limits_.top_k));
    }
  }
};

}  // namespace effinfer::cuda
