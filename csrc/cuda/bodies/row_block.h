// What the threads of a block that has a row tell each other: sums, maxima, prefixes. All of them
// have a fixed order, and all threads get the same bits.
#pragma once

#include <cstdint>

#include "cuda/unit.h"

namespace effinfer::cuda {

inline constexpr int kRowThreads = 512;
inline constexpr int kRowWarps = kRowThreads / kWarp;

// Numbers of a warp each, by turns: whoever writes a turn again has passed the barrier of the next
// one, which nobody reaches before he has read his own.
struct RowExchange {
  static constexpr int kMost = 4;  // of a thread in one turn

  double sums[2][kMost][kRowWarps];
  int counts[2][kMost][kRowWarps];
};

template <class Unit>
class RowBlock {
 public:
  EFFINFER_DEVICE RowBlock(Unit& unit, RowExchange& exchange) : unit_(unit), exchange_(exchange) {}

  // The sums over the threads of the first `warps` warps; the others' numbers do not count.
  template <int kCount>
  EFFINFER_DEVICE void sum(double (&values)[kCount], int warps = kRowWarps) {
    join(values, exchange_.sums[turn_], warps, [](double a, double b) { return a + b; });
  }
  template <int kCount>
  EFFINFER_DEVICE void sum(int (&values)[kCount], int warps = kRowWarps) {
    join(values, exchange_.counts[turn_], warps, [](int a, int b) { return a + b; });
  }
  template <int kCount>
  EFFINFER_DEVICE void max(int (&values)[kCount]) {
    join(values, exchange_.counts[turn_], kRowWarps, [](int a, int b) { return a > b ? a : b; });
  }

  // The sum over the threads before this one; `total`: over all.
  EFFINFER_DEVICE double prefix(double value, double& total) {
    double before = 0.0;
    double sum = scan(value, before);
    sum = unit_.shfl(sum, kWarp - 1);
    double (&sums)[kRowWarps] = exchange_.sums[turn_][0];
    if (unit_.lane == 0) sums[unit_.warp] = sum;
    unit_.sync();
    turn_ ^= 1;
    total = 0.0;
    double of_warps = 0.0;
    EFFINFER_UNROLL
    for (int w = 0; w < kRowWarps; ++w) {
      if (w == unit_.warp) of_warps = total;
      total += sums[w];
    }
    return of_warps + before;
  }

  // The sum over the lanes up to this one; `before`: without it.
  template <class T>
  EFFINFER_DEVICE T scan(T value, T& before) {
    EFFINFER_UNROLL
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const T other = unit_.shfl(value, unit_.lane >= distance ? unit_.lane - distance : 0);
      if (unit_.lane >= distance) value += other;
    }
    before = unit_.shfl(value, unit_.lane > 0 ? unit_.lane - 1 : 0);
    if (unit_.lane == 0) before = 0;
    return value;
  }

  // Of numbers that lanes have one behind the other, those that are `in`: how many there are before
  // the lane's, and of the warp.
  template <int kCount>
  EFFINFER_DEVICE int count_in(const bool (&in)[kCount], int& before) {
    const uint32_t lower = (uint32_t{1} << unit_.lane) - 1;
    int all = 0;
    before = 0;
    EFFINFER_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const uint32_t votes = unit_.ballot(in[i]);
      all += unit_.popcount(votes);
      before += unit_.popcount(votes & lower);
    }
    return all;
  }

  template <class T>
  EFFINFER_DEVICE T warp_sum(T value) {
    EFFINFER_UNROLL
    for (int mask = kWarp / 2; mask > 0; mask /= 2) value += unit_.shfl_xor(value, mask);
    return value;
  }

  EFFINFER_DEVICE Unit& unit() { return unit_; }

 private:
  template <class T, int kCount, class Join>
  EFFINFER_DEVICE void join(T (&values)[kCount], T (&slots)[RowExchange::kMost][kRowWarps],
                            int warps, Join&& two) {
    static_assert(kCount <= RowExchange::kMost);
    if (unit_.warp < warps) {
      EFFINFER_UNROLL
      for (int i = 0; i < kCount; ++i) {
        EFFINFER_UNROLL
        for (int mask = kWarp / 2; mask > 0; mask /= 2) {
          values[i] = two(values[i], unit_.shfl_xor(values[i], mask));
        }
        if (unit_.lane == 0) slots[i][unit_.warp] = values[i];
      }
    }
    unit_.sync();
    turn_ ^= 1;
    EFFINFER_UNROLL
    for (int i = 0; i < kCount; ++i) {
      values[i] = slots[i][0];
      for (int w = 1; w < warps; ++w) values[i] = two(values[i], slots[i][w]);
    }
  }

  Unit& unit_;
  RowExchange& exchange_;
  int turn_ = 0;
};

}  // namespace effinfer::cuda
