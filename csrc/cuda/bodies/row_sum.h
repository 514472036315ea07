// The sum of a number of each thread of a row, in an order that only the row's threads decide.
#pragma once

#include "cuda/unit.h"

namespace effinfer::cuda {

// All threads get the same bits: float addition is commutative, and every step of the butterfly
// adds the same two numbers in both lanes of a pair.
template <class Unit>
EFFINFER_DEVICE float warp_sum(Unit& unit, float value) {
  EFFINFER_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value += unit.shfl_xor(value, mask);
  return value;
}

// The row is a warp's, or the block's: then of its warps' sums from the first to the last, by way
// of `partial`, which is used once a kernel: nobody waits before it would be written again.
template <int kRowThreads, class Unit>
EFFINFER_DEVICE float row_sum(Unit& unit, float value, float (&partial)[kRowThreads / kWarp]) {
  value = warp_sum(unit, value);
  if constexpr (kRowThreads > kWarp) {
    if (unit.lane == 0) partial[unit.warp] = value;
    unit.sync();
    value = partial[0];
    EFFINFER_UNROLL
    for (int i = 1; i < kRowThreads / kWarp; ++i) value += partial[i];
  }
  return value;
}

}  // namespace effinfer::cuda
