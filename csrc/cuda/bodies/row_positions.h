// Rows' sequences and positions, and sequences' lengths (ops/row_positions.h): a thread one of
// them.
#pragma once

#include <cstdint>

#include "cuda/unit.h"
#include "ops/row_positions.h"

namespace effinfer::cuda {

struct RowPositionsKernel {
  static constexpr const char* kName = "row_positions";
  static constexpr int kThreads = 128;
  using Params = ops::RowPositionsProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t row = int64_t{unit.block} * kThreads + unit.thread;
    if (row >= p.rows) return;
    // The first sequence that ends behind the row.
    int64_t low = 0;
    int64_t high = p.num_sequences;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (unit.load(p.indptr + middle + 1) > row) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const bool found = low < p.num_sequences;
    if (p.sequences != nullptr) p.sequences[row] = found ? static_cast<int32_t>(low) : -1;
    int64_t position = 0;
    if (found) {
      position =
          row - unit.load(p.indptr + (p.are_ends ? low + 1 : low)) + unit.load(p.offsets + low);
    }
    p.positions[row] = static_cast<int32_t>(position);
  }
};

struct PageLengthsKernel {
  static constexpr const char* kName = "page_lengths";
  static constexpr int kThreads = 128;
  using Params = ops::PageLengthsProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t s = int64_t{unit.block} * kThreads + unit.thread;
    if (s >= p.num_sequences) return;
    const int32_t pages = unit.load(p.indptr + s + 1) - unit.load(p.indptr + s) - 1;
    p.out[s] = (pages > 0 ? pages : 0) * p.page_size + unit.load(p.last_page_len + s);
  }
};

}  // namespace effinfer::cuda
