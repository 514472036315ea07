// The highest numbers of a row: a block a row. Each thread knows the best of its own share that has
// not been taken; the best of those is taken k times, and then its warp looks for the next one of
// that share together: 32 lanes have as many loads under way, where one would wait for its own.
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
    const Row row = {p.x + unit.block * p.cols, static_cast<int>(p.cols),
                     p.cols % kChunkNumbers == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0};
    uint64_t mine = best_of_share(unit, row);
    for (int32_t i = 0; i < p.k; ++i) {
      const uint64_t winner = best_of_block(unit, mine, shared.best[i % 2]);
      const auto index = static_cast<int32_t>(~static_cast<uint32_t>(winner));
      const int owner = index / kChunkNumbers % kThreads;
      if (owner / kWarp != unit.warp) continue;
      uint64_t next = 0;
      const int step = kWarp * kThreads;
      for (int c = owner + unit.lane * kThreads; c * kChunkNumbers < row.cols; c += step) {
        const uint64_t key = best_below(unit, row, c, winner);
        next = key > next ? key : next;
      }
      next = best_of_warp(unit, next);
      if (unit.lane != owner % kWarp) continue;
      mine = next;
      p.values[unit.block * int64_t{p.k} + i] = row.x[index];
      p.indices[unit.block * int64_t{p.k} + i] = index;
    }
  }

 private:
  static constexpr int kChunkNumbers = 4;  // chunk c is of the share of thread c % kThreads
  static constexpr int kTogether = 8;      // chunks of a thread under way

  struct Row {
    const float* x;
    int cols;
    bool vectored;
  };

  // Numbers in the order of these; 0 is below all.
  EFFINFER_DEVICE static uint32_t order_of(uint32_t bits) {
    const float value = float_of(bits);
    bits = bits_of(value + 0.0f);
    const uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
    return value == value ? ordered : 0xffffffffu;
  }
  // With their indices, so that no two are alike.
  EFFINFER_DEVICE static uint64_t key_of(uint32_t order, int index) {
    return uint64_t{order} << 32 | ~static_cast<uint32_t>(index);
  }

  // Behind the row's end nothing is higher than anything.
  template <class Unit>
  EFFINFER_DEVICE static Quad load(Unit& unit, const Row& row, int chunk) {
    const int first = chunk * kChunkNumbers;
    constexpr uint32_t kLowest = 0xff800000u;  // minus infinity
    Quad quad = {{kLowest, kLowest, kLowest, kLowest}};
    if (row.vectored) {
      if (first < row.cols) quad = unit.load(reinterpret_cast<const Quad*>(row.x + first));
      return quad;
    }
    EFFINFER_UNROLL
    for (int e = 0; e < kChunkNumbers; ++e) {
      if (first + e < row.cols) quad.words[e] = bits_of(unit.load(row.x + first + e));
    }
    return quad;
  }

  // Of all of the thread's share: the first of its highest numbers. Floats compare as keys do, but
  // for NaNs, which are rare enough to look again.
  template <class Unit>
  EFFINFER_DEVICE static uint64_t best_of_share(Unit& unit, const Row& row) {
    int index = unit.thread * kChunkNumbers;
    if (index >= row.cols) return 0;
    float best = unit.load(row.x + index);
    bool has_nan = false;
    EFFINFER_NO_UNROLL
    for (int c = unit.thread; c * kChunkNumbers < row.cols; c += kTogether * kThreads) {
      Quad quads[kTogether];
      EFFINFER_UNROLL
      for (int i = 0; i < kTogether; ++i) quads[i] = load(unit, row, c + i * kThreads);
      EFFINFER_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        EFFINFER_UNROLL
        for (int e = 0; e < kChunkNumbers; ++e) {
          const float value = float_of(quads[i].words[e]);
          has_nan = has_nan || value != value;
          if (value > best) {
            best = value;
            index = (c + i * kThreads) * kChunkNumbers + e;
          }
        }
      }
    }
    if (!has_nan) return key_of(order_of(bits_of(best)), index);
    uint64_t highest = 0;
    for (int c = unit.thread; c * kChunkNumbers < row.cols; c += kThreads) {
      const uint64_t key = best_below(unit, row, c, ~uint64_t{0});
      highest = key > highest ? key : highest;
    }
    return highest;
  }
  // Of a chunk: its highest number of those below `limit`.
  template <class Unit>
  EFFINFER_DEVICE static uint64_t best_below(Unit& unit, const Row& row, int chunk,
                                             uint64_t limit) {
    const Quad quad = load(unit, row, chunk);
    uint64_t best = 0;
    EFFINFER_UNROLL
    for (int e = 0; e < kChunkNumbers; ++e) {
      const int index = chunk * kChunkNumbers + e;
      const uint64_t key = key_of(order_of(quad.words[e]), index);
      if (index < row.cols && key < limit && key > best) best = key;
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
