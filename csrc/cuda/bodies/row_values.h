// Passes over a row of a vocabulary in global memory, by the threads of a block. Each warp has a
// contiguous part of the row, so that what it finds is in the order of tokens, and its lanes have
// chunks of 16 bytes by turns.
#pragma once

#include <cstdint>

#include "cuda/bodies/row_block.h"
#include "cuda/bodies/row_chunks.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// What the first pass tells of a row.
struct RowExtent {
  float highest;  // of the row
  float mine;     // the highest of the thread's values
  float lowest;
  bool has_nan;
  double total;  // of weights
};

// Of the part of the row that each warp has.
struct RowParts {
  double head[kRowWarps];  // weights above the range, or of what is left
  int count[kRowWarps];    // values in the range
};

template <class T>
struct RowValues {
  static constexpr int kPerLane = kChunk<T>;
  static constexpr int kPerTile = kWarp * kPerLane;  // of a warp
  // Loads under way of a thread: 32 KB in all, as much as an SM needs to keep its share of an
  // H100's memory busy.
  static constexpr int kLoads = 4;
  static constexpr int kPart = 1024;  // parts are whole numbers of these: kLoads tiles, any type

  const T* row = nullptr;
  int size = 0;
  int part = 0;  // values of a warp
  bool vectored = false;

  EFFINFER_DEVICE static RowValues of(const T* row, int size, bool vectored) {
    const int part = (size + kRowWarps * kPart - 1) / (kRowWarps * kPart) * kPart;
    return {row, size, part, vectored};
  }

  // The values from `first` on, `fill` behind the row's end.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, int first, float fill, float (&out)[kPerLane]) const {
    EFFINFER_UNROLL
    for (int e = 0; e < kPerLane; ++e) out[e] = fill;
    if (vectored) {
      if (first < size) decode<T>(unit, unit.load(reinterpret_cast<const Quad*>(row + first)), out);
      return;
    }
    EFFINFER_UNROLL
    for (int e = 0; e < kPerLane; ++e) {
      if (first + e < size) out[e] = load_one(unit, first + e);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE float load_one(Unit& unit, int index) const {
    if constexpr (sizeof(T) == 4) {
      return unit.load(row + index);
    } else {
      const auto* bits = reinterpret_cast<const uint16_t*>(row);
      return widen(unit, T{unit.load(bits + index)});
    }
  }

  // visit(values, first) for all chunks of the thread, ascending; threads of a warp are in step.
  template <class Unit, class Visit>
  EFFINFER_DEVICE void visit(Unit& unit, float fill, Visit&& each) const {
    const int begin = unit.warp * part;
    const int end = begin + part < size ? begin + part : size;
    for (int base = begin; base < end; base += kLoads * kPerTile) {
      const int first = base + unit.lane * kPerLane;
      float values[kLoads][kPerLane];
      EFFINFER_UNROLL
      for (int i = 0; i < kLoads; ++i) load(unit, first + i * kPerTile, fill, values[i]);
      EFFINFER_UNROLL
      for (int i = 0; i < kLoads; ++i) each(values[i], first + i * kPerTile);
    }
  }
};

}  // namespace effinfer::cuda
