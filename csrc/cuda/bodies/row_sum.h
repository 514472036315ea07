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

// Of a row's block that has not all warps that its kernel may have.
inline constexpr int kFewRowWarps = 8;

// A number of each warp of a row's block.
template <int kMostWarps>
struct RowPartials {
  alignas(kMostWarps > 1 ? 16 : 4) float of[kMostWarps];
};

// The row is a warp's, or the block's: then of its warps' sums from the first to the last, by way
// of `partials`, all of them or the first few. Whoever writes them again has passed another
// barrier of the block.
template <int kMostWarps, class Unit>
EFFINFER_DEVICE float row_sum(Unit& unit, float value, int warps,
                              RowPartials<kMostWarps>& partials) {
  value = warp_sum(unit, value);
  if constexpr (kMostWarps > 1) {
    float (&of)[kMostWarps] = partials.of;
    if (unit.lane == 0) of[unit.warp] = value;
    unit.sync();
    value = of[0];
    EFFINFER_UNROLL
    for (int i = 1; i < kFewRowWarps; ++i) value += of[i];
    if (warps > kFewRowWarps) {
      EFFINFER_UNROLL
      for (int i = kFewRowWarps; i < kMostWarps; ++i) value += of[i];
    }
  }
  return value;
}

}  // namespace effinfer::cuda
