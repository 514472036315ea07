// The end of a row that is split, by one block: the filter ends in the row's list, and a token is
// drawn, first among the row's warps by their sums, then among the values of one.
//
// Warps add in a fixed order, and so does who adds up theirs. Their entries of the list lie
// wherever there was room: here they are taken in the order of warps, which is that of tokens.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/split_rows.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// Of the warps of a row, neighbours being a thread's.
struct SplitEndShared {
  static constexpr int kMostWarps = ops::SamplingScratch::kMostParts * kRowWarps;
  static constexpr int kOwn = kMostWarps / kRowThreads;

  double kept[kMostWarps];
  int32_t ends[kMostWarps];  // of their entries in the list
  int32_t warp;              // that has the token
  double left;               // the point in it
};

template <class Unit>
class SplitEnd {
 public:
  EFFINFER_DEVICE SplitEnd(RowBlock<Unit>& block, const SplitRow& row,
                           const ops::RowSamplingProblem& p, RowList& list, SplitEndShared& shared)
      : block_(block), row_(row), p_(p), list_(list), shared_(shared) {}

  // What parts have told of the row: the list is taken, behind the next barrier.
  EFFINFER_DEVICE RowKnown take(RowPlan plan) {
    double sums[2] = {};
    int listed = 0;
    if (plan == RowPlan::all) {
      each_warp([&](int, int warp) { take_warp(warp, sums); });
    } else {
      listed = gather(sums);
      block_.sum(sums);
    }
    return {plan, listed, sums[0], sums[1]};
  }

  // The token, of the weights that filters keep.
  template <class Heads>
  EFFINFER_DEVICE void draw_token(const RowWeights& rule, Heads& heads, RowPlan plan) {
    if (plan == RowPlan::share) add_listed(heads);
    double total[1] = {};
    each_warp([&](int, int warp) { total[0] += shared_.kept[warp]; });
    block_.sum(total);
    heads.set_total(total[0]);
    draw_of_warp(RowPoint::of(p_, row_.row, heads), heads, rule);
  }

 private:
  static constexpr int kOwn = SplitEndShared::kOwn;

  EFFINFER_DEVICE Unit& unit() { return block_.unit(); }

  // each(i, warp) for the thread's.
  template <class Each>
  EFFINFER_DEVICE void each_warp(Each&& each) {
    EFFINFER_UNROLL
    for (int i = 0; i < kOwn; ++i) each(i, unit().thread * kOwn + i);
  }
  EFFINFER_DEVICE WarpSums take_warp(int warp, double (&sums)[2]) {
    WarpSums of_warp{};
    if (warp < row_.parts * kRowWarps) of_warp = row_.warps()[warp];
    shared_.kept[warp] = of_warp.kept;
    sums[0] += of_warp.kept;
    sums[1] += of_warp.total;
    return of_warp;
  }

  // The warps' entries, in the order of tokens, behind the next barrier; how many there are.
  // `sums`: of the thread's warps.
  EFFINFER_DEVICE int gather(double (&sums)[2]) {
    int first[kOwn];
    int listed[kOwn];
    int own = 0;
    each_warp([&](int i, int warp) {
      const WarpSums of_warp = take_warp(warp, sums);
      first[i] = of_warp.first;
      listed[i] = of_warp.listed;
      own += of_warp.listed;
    });
    double all = 0.0;
    int to = static_cast<int>(block_.prefix(own, all));
    each_warp([&](int i, int warp) {
      const int end = to + listed[i];
      EFFINFER_NO_UNROLL
      for (int from = first[i]; to < end; ++from, ++to) {
        list_.values[to] = row_.list_values()[from];
        list_.ids[to] = row_.list_ids()[from];
      }
      shared_.ends[warp] = end;
    });
    return static_cast<int>(all);
  }

  // What the list keeps joins the sums of the warps that its tokens are of.
  template <class Heads>
  EFFINFER_DEVICE void add_listed(const Heads& heads) {
    each_warp([&](int, int warp) {
      const int begin = warp > 0 ? shared_.ends[warp - 1] : 0;
      double kept = shared_.kept[warp];
      EFFINFER_NO_UNROLL
      for (int at = begin; at < shared_.ends[warp]; ++at) {
        const float weight = list_.values[at];
        if (heads.weights().has(weight, list_.ids[at])) kept += static_cast<double>(weight);
      }
      shared_.kept[warp] = kept;
    });
  }

  template <class Heads>
  EFFINFER_DEVICE void draw_of_warp(const RowPoint& at, const Heads& heads,
                                    const RowWeights& rule) {
    double sums[kOwn];
    each_warp([&](int i, int warp) { sums[i] = shared_.kept[warp]; });
    double total = 0.0;
    const Drawn of_warps = draw(block_, sums, at.point, total);
    if (of_warps.here) {
      const int warp = unit().thread * kOwn + of_warps.which;
      // Away from the rounding of the warp's own sum.
      const double sum = shared_.kept[warp] * (1.0 - 0x1p-40);
      shared_.warp = warp;
      shared_.left = of_warps.below < sum ? of_warps.below : sum;
    }
    unit().sync();
    static_assert(SplitRow::kOfWarp == kRowThreads);
    const int token = shared_.warp * kRowThreads + unit().thread;
    float weights[1] = {};
    if (token < p_.vocab) {
      const float x = unit().load(row_.values().row + token);
      const float weight = rule.exact(unit(), x);
      if (heads.weights().has(weight, token)) weights[0] = weight;
    }
    const Drawn drawn = draw(block_, weights, shared_.left, total);
    if (drawn.here) at.settle(p_, row_.row, token, drawn);
  }

  RowBlock<Unit>& block_;
  const SplitRow& row_;
  const ops::RowSamplingProblem& p_;
  RowList& list_;
  SplitEndShared& shared_;
};

}  // namespace effinfer::cuda
