// What the query heads of a KV head make of their scores (ops::HeadVote), as values of a row
// (row_values.h): joined anew in each pass, by what each head's softmax divides by.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_values.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/page_index.h"

namespace effinfer::cuda {

struct VotedScores {
  static constexpr int kPerLane = RowValues::kPerLane;
  static constexpr int kPerTile = kWarp * kPerLane;                                   // of a warp
  static constexpr int kWindows = static_cast<int>(ops::kPageSize / ops::kMeanUnit);  // of a page

  const float* scores;  // [group][stride], of each unit; of windows four a page, but for the last
  int64_t stride;
  const float* log_sums;  // [group], of more than one head
  int group;
  bool adds;
  bool windows;
  int size;  // units that are chosen from
  int part;  // of a warp

  template <class Unit>
  EFFINFER_DEVICE float at(Unit& unit, int index) const {
    if (!windows) {
      return joined([&](int head) { return unit.load(scores + head * stride + index); });
    }
    // Of the windows that the page shares keys with the highest.
    const int last = size * kWindows - 2;
    const int first = index > 0 ? index * kWindows - 1 : 0;
    float highest = -INFINITY;
    for (int i = first; i < (index + 1) * kWindows && i <= last; ++i) {
      const float x = joined([&](int head) { return unit.load(scores + head * stride + i); });
      highest = x > highest || x != x ? x : highest;
    }
    return highest;
  }

  // The values from `first` on, `fill` behind the last.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, int first, float fill, float (&out)[kPerLane]) const {
    EFFINFER_UNROLL
    for (int e = 0; e < kPerLane; ++e) out[e] = first + e < size ? at(unit, first + e) : fill;
  }
  template <class Unit, class Visit>
  EFFINFER_DEVICE void visit(Unit& unit, float fill, Visit&& each) const {
    const int begin = unit.warp * part;
    const int end = begin + part < size ? begin + part : size;
    int first = begin + unit.lane * kPerLane;
    EFFINFER_NO_UNROLL
    for (int base = begin; base < end; base += kPerTile) {
      float values[kPerLane];
      load(unit, first, fill, values);
      each(values, first);
      first += kPerTile;
    }
  }

 private:
  template <class Score>
  EFFINFER_DEVICE float joined(Score&& score) const {
    if (group == 1) return score(0);
    float all = adds ? 0.0f : -INFINITY;
    for (int head = 0; head < group; ++head) {
      const float x = score(head) - log_sums[head];
      if (adds) {
        all += exp2f(rounded_product(x, kLog2e));
      } else {
        all = x > all || x != x ? x : all;  // a NaN stays one
      }
    }
    return all;
  }
};

}  // namespace effinfer::cuda
