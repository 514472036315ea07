// Passes over a row of float32 of a vocabulary in global memory, by the threads of a block. Each
// warp has a contiguous part of the row, so that what it finds is in the order of tokens, and its
// lanes have chunks of 16 bytes by turns.
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

struct RowValues {
  static constexpr int kPerLane = kChunk<float>;
  static constexpr int kPerTile = kWarp * kPerLane;  // of a warp
  // Loads under way of a thread: 32 KB in all, as much as an SM needs to keep its share of an
  // H100's memory busy.
  static constexpr int kLoads = 4;
  static constexpr int kPart = 1024;  // parts are whole numbers of these

  const float* row = nullptr;
  int size = 0;
  int part = 0;  // values of a warp
  bool vectored = false;

  EFFINFER_DEVICE static RowValues of(const float* row, int size, bool vectored) {
    const int part = (size + kRowWarps * kPart - 1) / (kRowWarps * kPart) * kPart;
    return {row, size, part, vectored};
  }

  // The values from `first` on, `fill` behind the row's end.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, int first, float fill, float (&out)[kPerLane]) const {
    values_of(load_words(unit, first), first, fill, out);
  }

  // visit(values, first) for all chunks of the thread, ascending; threads of a warp are in step. A
  // chunk is asked for kLoads turns before its own. The visit is one piece of code: unrolled, the
  // passes of a kernel are so many that instructions miss their cache.
  template <class Unit, class Visit>
  EFFINFER_DEVICE void visit(Unit& unit, float fill, Visit&& each) const {
    const int begin = unit.warp * part;
    const int end = begin + part < size ? begin + part : size;
    int first = begin + unit.lane * kPerLane;
    Quad ahead[kLoads];
    EFFINFER_UNROLL
    for (int i = 0; i < kLoads; ++i) ahead[i] = load_words(unit, first + i * kPerTile);
    EFFINFER_NO_UNROLL
    for (int base = begin; base < end; base += kPerTile) {
      const Quad words = ahead[0];
      EFFINFER_UNROLL
      for (int i = 0; i + 1 < kLoads; ++i) ahead[i] = ahead[i + 1];
      ahead[kLoads - 1] = load_words(unit, first + kLoads * kPerTile);
      float values[kPerLane];
      values_of(words, first, fill, values);
      each(values, first);
      first += kPerTile;
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE Quad load_words(Unit& unit, int first) const {
    Quad quad{};
    if (vectored) {
      if (first < size) quad = unit.load(reinterpret_cast<const Quad*>(row + first));
      return quad;
    }
    EFFINFER_UNROLL
    for (int e = 0; e < kPerLane; ++e) {
      if (first + e < size) quad.words[e] = bits_of(unit.load(row + first + e));
    }
    return quad;
  }

  EFFINFER_DEVICE void values_of(const Quad& words, int first, float fill,
                                 float (&out)[kPerLane]) const {
    EFFINFER_UNROLL
    for (int e = 0; e < kPerLane; ++e) {
      out[e] = first + e < size ? float_of(words.words[e]) : fill;
    }
  }
};

}  // namespace effinfer::cuda
