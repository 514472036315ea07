// Where the head of a row ends that holds a number of tokens, or a share of the weight: a search
// for the least value of the head, in the order of floats (key_of()). Nothing is sorted. A round
// counts what is not below three pivots at once; an interval of floats ends as one float after at
// most 16.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_block.h"
#include "cuda/bodies/row_weights.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

inline constexpr int kPivots = 3;

// The amount not below `low` reaches the goal, that above `high` does not.
struct KeyRange {
  uint32_t low;
  uint32_t high;

  EFFINFER_DEVICE bool is_one() const { return low >= high; }
  // Above `low`, ascending.
  EFFINFER_DEVICE uint32_t pivot(int i) const {
    const uint32_t span = high - low;
    const auto part = static_cast<uint32_t>(i + 1);
    return low + span / (kPivots + 1) * part +
           (span % (kPivots + 1) * part + kPivots) / (kPivots + 1);
  }
  // Whether the goal is reached by what is not below a pivot, and whether it is not.
  EFFINFER_DEVICE void tell(uint32_t key, bool reached, bool missed) {
    if (reached && key > low) low = key;
    if (missed && key <= high) high = key - 1;
  }
};

// The last value of a head.
struct HeadEnd {
  float least;
  double above;  // the amount of what is above it
  int equal;
  int needed;  // of those that are equal to it
};

// How many of the values equal to `least` the head needs to reach its goal.
template <bool kWeights>
EFFINFER_DEVICE HeadEnd head_end(float least, double above, int equal, double goal) {
  const double missing = goal - above;
  double needed = missing;
  if constexpr (kWeights) needed = ceil(missing / static_cast<double>(least));
  if (!(needed > 1.0)) needed = 1.0;
  return {least, above, equal, needed < equal ? static_cast<int>(needed) : equal};
}

// Calls pick(n) in the thread that has the `wanted`-th (from 1 on) of what own(tile) counts of each
// thread, n: which of its own that is. Tiles and threads in order; there are enough.
template <class Unit, class Own, class Pick>
EFFINFER_DEVICE void pick_nth(RowBlock<Unit>& block, int wanted, Own&& own, Pick&& pick) {
  double left = wanted;
  EFFINFER_NO_UNROLL
  for (int tile = 0; left > 0.0; ++tile) {
    const int mine = own(tile);
    double total = 0.0;
    const double before = block.prefix(mine, total);
    if (before < left && left <= before + mine) pick(tile, static_cast<int>(left - before));
    left -= total;
  }
}

// Values in shared memory, in the order of their tokens; a NaN is none.
struct RowList {
  static constexpr int kMost = 4096;
  static constexpr int kPerThread = kMost / kRowThreads;

  float values[kMost];
  int32_t ids[kMost];

  // Warps that have one of the first `size` entries when they go round by threads.
  EFFINFER_DEVICE static int warps_of(int size) {
    return size >= kRowThreads ? kRowWarps : size > 0 ? (size + kWarp - 1) / kWarp : 1;
  }
  // visit(entry) for the thread's entries.
  template <class Unit, class Visit>
  EFFINFER_DEVICE static void visit(Unit& unit, int size, Visit&& each) {
    EFFINFER_NO_UNROLL
    for (int i = unit.thread; i < size; i += kRowThreads) each(i);
  }

  // The end of the head of these values with an amount of `goal`: of tokens, or of the sum of
  // values, which are not negative then.
  template <bool kWeights, class Unit>
  EFFINFER_DEVICE HeadEnd end_of_head(RowBlock<Unit>& block, int size, double goal,
                                      const KeyRange& range) const {
    return end_of_head<kWeights>(block, values, size, goal, range);
  }
  template <bool kWeights, class Unit>
  EFFINFER_DEVICE static HeadEnd end_of_head(RowBlock<Unit>& block, const float* values, int size,
                                             double goal, KeyRange range) {
    const int warps = warps_of(size);
    float mine[kPerThread];
    uint32_t lowest = ~uint32_t{0};
    uint32_t highest = 0;
    EFFINFER_UNROLL
    for (int i = 0; i < kPerThread; ++i) {
      const int place = block.unit().thread + i * kRowThreads;
      mine[i] = place < size ? values[place] : NAN;
      if (mine[i] == mine[i]) extend(key_of(mine[i]), lowest, highest);
    }
    narrow(block, lowest, highest, range);
    while (!range.is_one()) {
      float pivots[kPivots];
      double amounts[kPivots] = {};
      EFFINFER_UNROLL
      for (int j = 0; j < kPivots; ++j) pivots[j] = value_of(range.pivot(j));
      amounts_from<kWeights>(block, mine, size, pivots, warps, amounts);
      const KeyRange old = range;
      EFFINFER_UNROLL
      for (int j = 0; j < kPivots; ++j) {
        range.tell(old.pivot(j), amounts[j] >= goal, !(amounts[j] >= goal));
      }
    }
    const float least = value_of(range.low);
    double above[1] = {};
    int equal[1] = {};
    EFFINFER_UNROLL
    for (int i = 0; i < kPerThread; ++i) {
      if (mine[i] > least) above[0] += kWeights ? static_cast<double>(mine[i]) : 1.0;
      if (mine[i] == least) ++equal[0];
    }
    block.sum(above, warps);
    block.sum(equal, warps);
    return head_end<kWeights>(least, above[0], equal[0], goal);
  }

  // A value that at least `goal` of these are not below, of which there are as many: and no more
  // than `most`, unless values are equal. It runs once, and is a loop where registers would take
  // code for each of them.
  template <class Unit>
  EFFINFER_DEVICE static float bound_of_head(RowBlock<Unit>& block, const float* values, int size,
                                             int goal, int most) {
    uint32_t least = ~uint32_t{0};
    uint32_t greatest = 0;
    visit(block.unit(), size, [&](int i) { extend(key_of(values[i]), least, greatest); });
    KeyRange range{key_of(-INFINITY), key_of(INFINITY)};
    narrow(block, least, greatest, range);
    for (bool ends = false; !ends && !range.is_one();) {
      const KeyRange old = range;
      int counts[kPivots] = {};
      visit(block.unit(), size, [&](int i) {
        EFFINFER_UNROLL
        for (int j = 0; j < kPivots; ++j) counts[j] += values[i] >= value_of(old.pivot(j)) ? 1 : 0;
      });
      block.sum(counts);
      EFFINFER_UNROLL
      for (int j = 0; j < kPivots; ++j) {
        const bool reached = counts[j] >= goal;
        range.tell(old.pivot(j), reached, !reached);
        ends = ends || (reached && counts[j] <= most);
      }
    }
    return value_of(range.low);
  }

  // That head itself. All threads get it; `found` is shared memory.
  template <bool kWeights, class Unit>
  EFFINFER_DEVICE static RowHead head(RowBlock<Unit>& block, const float* values, int size,
                                      double goal, const KeyRange& range, int32_t& found) {
    const HeadEnd end = end_of_head<kWeights>(block, values, size, goal, range);
    return {end.least, ties_end(block, values, size, end, found, [](int place) { return place; })};
  }

  // Of the values that are equal to the head's end those whose tokens come before this one belong
  // to it. id(place): the token of a value. All threads get it; `found` is shared memory.
  template <class Unit, class Id>
  EFFINFER_DEVICE static int32_t ties_end(RowBlock<Unit>& block, const float* values, int size,
                                          const HeadEnd& end, int32_t& found, Id&& id) {
    if (end.needed >= end.equal) return INT32_MAX;
    const auto place = [&](int tile) { return tile * kRowThreads + block.unit().thread; };
    pick_nth(
        block, end.needed,
        [&](int tile) { return place(tile) < size && values[place(tile)] == end.least ? 1 : 0; },
        [&](int tile, int) { found = id(place(tile)) + 1; });
    block.unit().sync();
    return found;
  }

 private:
  EFFINFER_DEVICE static void extend(uint32_t key, uint32_t& least, uint32_t& greatest) {
    if (key < least) least = key;
    if (key > greatest) greatest = key;
  }

  // To the values that there are, which takes less than the rounds that it saves. Of threads' least
  // and greatest keys.
  template <class Unit>
  EFFINFER_DEVICE static void narrow(RowBlock<Unit>& block, uint32_t least, uint32_t greatest,
                                     KeyRange& range) {
    // As integers with a sign.
    int ends[2] = {static_cast<int>(greatest ^ 0x80000000u),
                   static_cast<int>(~least ^ 0x80000000u)};
    block.max(ends);
    greatest = static_cast<uint32_t>(ends[0]) ^ 0x80000000u;
    least = ~(static_cast<uint32_t>(ends[1]) ^ 0x80000000u);
    if (least > greatest) return;  // there are none
    if (least > range.low) range.low = least;
    if (greatest < range.high) range.high = greatest;
  }

  template <bool kWeights, class Unit>
  EFFINFER_DEVICE static void amounts_from(RowBlock<Unit>& block, const float (&mine)[kPerThread],
                                           int size, const float (&pivots)[kPivots], int warps,
                                           double (&amounts)[kPivots]) {
    int counts[kPivots] = {};
    EFFINFER_UNROLL
    for (int i = 0; i < kPerThread; ++i) {
      if (i * kRowThreads >= size) break;
      EFFINFER_UNROLL
      for (int j = 0; j < kPivots; ++j) {
        if constexpr (kWeights) {
          if (mine[i] >= pivots[j]) amounts[j] += static_cast<double>(mine[i]);
        } else {
          counts[j] += mine[i] >= pivots[j] ? 1 : 0;
        }
      }
    }
    if constexpr (kWeights) {
      block.sum(amounts, warps);
    } else {
      block.sum(counts, warps);
      EFFINFER_UNROLL
      for (int j = 0; j < kPivots; ++j) amounts[j] = counts[j];
    }
  }
};

}  // namespace effinfer::cuda
