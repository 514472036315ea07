// Queries of the heads that share keys, four heads side by side: what threads that have a key each
// (key_products.h) multiply it with.
#pragma once

#include "cuda/unit.h"

namespace effinfer::cuda {

struct TiledQueries {
  static constexpr int kHeads = 4;           // side by side; those that are not there are zeros
  static constexpr int kMostHeads = 128;     // that share keys
  static constexpr int kMostNumbers = 8192;  // of these
  static constexpr int kMostDims = 256;

  alignas(16) float rows[kMostNumbers / kHeads + kMostDims][kHeads];

  EFFINFER_DEVICE static int num_rows(int group, int dims) {
    return (group + kHeads - 1) / kHeads * dims;
  }
  EFFINFER_DEVICE float& at(int head, int dim, int dims) {
    return rows[head / kHeads * dims + dim][head % kHeads];
  }
  // Those of `head`, a multiple of kHeads, and of the heads behind it.
  EFFINFER_DEVICE const float (*of(int head, int dims) const)[kHeads] {
    return rows + head / kHeads * dims;
  }

  // Of `group` heads that follow each other, times `scale`. A barrier follows.
  template <class Unit>
  EFFINFER_DEVICE void set(Unit& unit, const float* q, int group, int dims, float scale,
                           int threads) {
    for (int i = unit.thread; i < num_rows(group, dims) * kHeads; i += threads) {
      const int head = i / kHeads / dims * kHeads + i % kHeads;
      const int dim = i / kHeads % dims;
      const float x = head < group ? unit.load(q + head * dims + dim) : 0.0f;
      rows[i / kHeads][i % kHeads] = unit.mul(x, scale);
    }
  }
};

}  // namespace effinfer::cuda
