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

  // Top-k of values, where it comes first. What else there is follows if there are to be weights.
  EFFINFER_DEVICE void keep_values() {
    if (!this->listed()) list_candidates();
    if (limits_.top_k == 0) return;
    if (this->listed()) {
      if (!limits_.joint) this->keep_listed_values();
      return;
    }
    if (limits_.joint && this->of_logits()) return;
    (limits_.joint ? top_ : values_) = this->value_head(limits_.top_k);
  }

  EFFINFER_DEVICE void keep_weights() {
    if (this->listed()) {
      keep_all_listed();
    } else {
      keep_in_row();
    }
  }

  // What is known of a row whose parts are weighed: nobody looks at all of it again, and its total
  // is its warps'.
  EFFINFER_DEVICE void take_known() {
    known_ = shared_.known.plan;
    if (known_ == RowPlan::few) listed_ = shared_.known.listed;
  }
  EFFINFER_DEVICE bool is_split() const {
    return known_ == RowPlan::share || known_ == RowPlan::all;
  }
  EFFINFER_DEVICE void set_total(double total) { total_ = total; }

 private:
  using Base::block_;
  using Base::extent_;
  using Base::limits_;
  using Base::listed_;
  using Base::passes_;
  using Base::shared_;
  using Base::size_;
  using Base::total_;
  using Base::values_;
  using Base::weights_;

  EFFINFER_DEVICE void list_candidates() {
    if (size_ <= RowList::kMost) {
      list_range(-INFINITY, INFINITY);
    } else if (limits_.top_k > 0 && limits_.top_k <= kFewest) {
      shared_.list.values[block_.unit().thread] = extent_.mine;
      const HeadEnd end = shared_.list.template end_of_head<false>(
          block_, kRowThreads, limits_.top_k, {key_of(-INFINITY), this->highest_key()});
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

  EFFINFER_DEVICE void keep_all_listed() {
    const bool is_whole = listed_ == size_;
    const double listed = this->weigh_listed(listed_);
    total_ = listed;
    if (limits_.joint && !is_whole) {
      total_ = this->of_logits() ? passes_.sum() : extent_.total;
    }
    if (limits_.top_p < 1.0f) {
      this->keep_listed_share(static_cast<double>(limits_.top_p) * total_, 0.0, listed);
    }
    if (limits_.joint && limits_.top_k > 0) {
      weights_ = shorter(weights_, this->template list_head<false>(limits_.top_k, 0.0));
    }
    this->keep_min_p();
    total_ = this->keep_listed(listed_);
  }

  EFFINFER_DEVICE void keep_in_row() {
    if (limits_.top_p < 1.0f && known_ != RowPlan::all) {
      if (!this->weigh_head(known_ == RowPlan::share)) {
        known_ = RowPlan::rest;
        this->weigh_head_exactly();
      }
    } else if (values_.least > -INFINITY || values_.ties_end != INT32_MAX) {
      total_ = passes_.sum(values_, weights_);
    } else if (known_ != RowPlan::all) {
      total_ = this->of_logits() ? passes_.sum() : extent_.total;
    }
    const RowHead before = weights_;
    if (limits_.joint && limits_.top_k > 0) keep_top_weights();
    this->keep_min_p();
    if (is_split()) return;
    if (before.least != weights_.least || before.ties_end != weights_.ties_end) {
      total_ = passes_.sum(values_, weights_);
    }
  }

  // Joint top-k: of logits by their weights, which may be equal where they are not.
  EFFINFER_DEVICE void keep_top_weights() {
    RowHead head = top_;
    if (this->of_logits()) {
      const HeadEnd end = passes_.template end_of_head<false>(
          values_, limits_.top_k, {key_of(0.0f), key_of(this->heaviest())});
      head = {end.least, INT32_MAX};
      if (end.needed < end.equal) {
        head.ties_end =
            passes_.template after_equal<true>(values_, end.least, end.needed, shared_.found);
      }
    }
    weights_ = shorter(weights_, head);
  }

  RowPlan known_ = RowPlan::rest;
  RowHead top_;  // of weights, where joint filters are to come
};

}  // namespace effinfer::cuda
