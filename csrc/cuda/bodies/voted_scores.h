// What the query heads of a KV head make of their scores (ops::HeadVote): one of each unit that is
// chosen from.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/page_index.h"

namespace effinfer::cuda {

struct VotedScores {
  static constexpr int kWindows = static_cast<int>(ops::kPageSize / ops::kMeanUnit);  // of a page

  const float* scores;  // [group][stride], of each unit; of windows four a page, but for the last
  int64_t stride;
  const float* log_sums;  // [group], of more than one head: what each head's softmax divides by
  int group;
  bool adds;
  bool windows;
  int size;  // units that are chosen from

  // How many scores a head has.
  EFFINFER_DEVICE int count() const { return windows ? size * kWindows - 1 : size; }

  // Of windows the highest of those that the page shares keys with.
  template <class Unit>
  EFFINFER_DEVICE float at(Unit& unit, int index) const {
    int first = index;
    int last = index;
    if (windows) {
      first = index > 0 ? index * kWindows - 1 : 0;
      last = (index + 1) * kWindows - 1 < count() ? (index + 1) * kWindows - 1 : count() - 1;
    }
    float highest = -INFINITY;
    EFFINFER_NO_UNROLL
    for (int i = first; i <= last; ++i) highest = higher(joined(unit, i), highest);
    return highest;
  }

 private:
  // A NaN stays one.
  EFFINFER_DEVICE static float higher(float x, float y) { return x > y || x != x ? x : y; }

  template <class Unit>
  EFFINFER_DEVICE float joined(Unit& unit, int index) const {
    if (group == 1) return unit.load(scores + index);
    float all = adds ? 0.0f : -INFINITY;
    EFFINFER_NO_UNROLL
    for (int head = 0; head < group; ++head) {
      const float x = unit.load(scores + head * stride + index) - log_sums[head];
      all = adds ? all + unit.exp2(rounded_product(x, kLog2e)) : higher(x, all);
    }
    return all;
  }
};

}  // namespace effinfer::cuda
