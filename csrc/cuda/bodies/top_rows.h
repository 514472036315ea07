// The highest numbers of a row: a block a row. Each thread knows the best of its own share that has
// not been taken; the best of those is taken k times, and its thread looks for its next one.
#pragma once

#include "cuda/unit.h"
#include "ops/top_rows.h"

namespace effinfer::cuda {

struct TopRows {
  static constexpr const char* kName = "top_rows";
  static constexpr int kThreads = 1024;
  static constexpr int kWarps = kThreads / kWarp;
  using Params = ops::TopRowsProblem;
  struct Shared {
    uint64_t best[2][kWarps];  // of a warp; by turns, so that a turn needs one barrier
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const float* row = p.x + unit.block * p.cols;
    uint64_t mine = best_below(unit, row, p.cols, ~uint64_t{0});
    for (int32_t i = 0; i < p.k; ++i) {
      const uint64_t winner = best_of_block(unit, mine, shared.best[i % 2]);
      const auto index = static_cast<int32_t>(~static_cast<uint32_t>(winner));
      if (index % kThreads == unit.thread) {
        p.values[unit.block * int64_t{p.k} + i] = row[index];
        p.indices[unit.block * int64_t{p.k} + i] = index;
        mine = best_below(unit, row, p.cols, winner);
      }
    }
  }

 private:
  // Numbers in the order of these, of which no two are alike; 0 is below all.
  EFFINFER_DEVICE static uint64_t key_of(float value, int32_t index) {
    const uint32_t bits = bits_of(value + 0.0f);
    const uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
    const uint32_t number = value == value ? ordered : 0xffffffffu;
    return uint64_t{number} << 32 | ~static_cast<uint32_t>(index);
  }

  // Of the thread's share.
  template <class Unit>
  EFFINFER_DEVICE static uint64_t best_below(Unit& unit, const float* row, int64_t cols,
                                             uint64_t limit) {
    uint64_t best = 0;
    for (int64_t i = unit.thread; i < cols; i += kThreads) {
      const uint64_t key = key_of(unit.load(row + i), static_cast<int32_t>(i));
      if (key < limit && key > best) best = key;
    }
    return best;
  }

  template <class Unit>
  EFFINFER_DEVICE static uint64_t best_of_block(Unit& unit, uint64_t key,
                                                uint64_t (&best)[kWarps]) {
    key = best_of_warp(unit, key);
    if (unit.lane == 0) best[unit.warp] = key;
    unit.sync();
    return best_of_warp(unit, best[unit.lane]);
  }
  template <class Unit>
  EFFINFER_DEVICE static uint64_t best_of_warp(Unit& unit, uint64_t key) {
    EFFINFER_UNROLL
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      const uint64_t other = unit.shfl_xor(key, mask);
      key = other > key ? other : key;
    }
    return key;
  }
};

}  // namespace effinfer::cuda
