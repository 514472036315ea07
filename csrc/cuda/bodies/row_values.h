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

// Chunks on their way to the threads that asked for them, each thread's own: nobody waits for
// another. Groups of copies are counted, where loads into registers are not: ptxas has all of a
// loop's loads set one scoreboard, so that the first one is there when the last one is.
struct RowRing {
  static constexpr int kSlots = 8;
  // Of a thread, but for the chunk at hand: 56 KB in all. Few rows leave half of an H100's SMs
  // idle, and its memory takes some 2.4 MB under way.
  static constexpr int kAhead = kSlots - 1;

  Quad slots[kSlots][kRowThreads];
};

struct RowValues {
  static constexpr int kPerLane = kChunk<float>;
  static constexpr int kPerTile = kWarp * kPerLane;  // of a warp
  static constexpr int kPart = 1024;                 // parts are whole numbers of these

  const float* row = nullptr;
  int size = 0;
  int part = 0;  // values of a warp
  bool vectored = false;
  RowRing* ring = nullptr;

  EFFINFER_DEVICE static RowValues of(const float* row, int size, bool vectored, RowRing& ring) {
    const int part = (size + kRowWarps * kPart - 1) / (kRowWarps * kPart) * kPart;
    return {row, size, part, vectored, &ring};
  }

  // The values from `first` on, `fill` behind the row's end.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, int first, float fill, float (&out)[kPerLane]) const {
    Quad quad = filled(fill);
    if (vectored) {
      if (first < size) quad = unit.load(reinterpret_cast<const Quad*>(row + first));
    } else {
      quad = load_words(unit, first, fill);
    }
    EFFINFER_UNROLL
    for (int e = 0; e < kPerLane; ++e) out[e] = float_of(quad.words[e]);
  }

  // visit(values, first) for all chunks of the thread, ascending; threads of a warp are in step.
  // The visit is one piece of code: unrolled, the passes of a kernel are so many that instructions
  // miss their cache.
  template <class Unit, class Visit>
  EFFINFER_DEVICE void visit(Unit& unit, float fill, Visit&& each) const {
    const int begin = unit.warp * part;
    const int end = begin + part < size ? begin + part : size;
    const int last = end - begin;
    // Of the thread's chunks, from the part's beginning on: the next one on its way, and at hand.
    int ahead = unit.lane * kPerLane;
    uint32_t slot = 0;
    const auto fetch_next = [&] {
      fetch(unit, begin, ahead, last, fill, ring->slots[slot % RowRing::kSlots][unit.thread]);
      ahead += kPerTile;
      ++slot;
    };
    EFFINFER_NO_UNROLL
    for (int i = 0; i < RowRing::kAhead; ++i) fetch_next();
    EFFINFER_NO_UNROLL
    for (int base = begin; base < end; base += kPerTile) {
      unit.template wait<RowRing::kAhead - 1>();
      const Quad words = ring->slots[(slot + 1) % RowRing::kSlots][unit.thread];
      fetch_next();  // to where the chunk before was
      float values[kPerLane];
      EFFINFER_UNROLL
      for (int e = 0; e < kPerLane; ++e) values[e] = float_of(words.words[e]);
      each(values, base + unit.lane * kPerLane);
    }
  }

 private:
  EFFINFER_DEVICE static Quad filled(float fill) {
    Quad quad;
    EFFINFER_UNROLL
    for (int e = 0; e < kPerLane; ++e) quad.words[e] = bits_of(fill);
    return quad;
  }

  // The chunk `at` of a part that begins there is on its way, or has come: `fill` from `last` on.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, int begin, int at, int last, float fill, Quad& to) const {
    if (at >= last) {
      to = filled(fill);
    } else if (vectored) {
      unit.copy_async(&to, row + begin + at);
    } else {
      to = load_words(unit, begin + at, fill);
    }
    unit.commit();
  }

  // Number by number.
  template <class Unit>
  EFFINFER_DEVICE Quad load_words(Unit& unit, int first, float fill) const {
    Quad quad = filled(fill);
    EFFINFER_UNROLL
    for (int e = 0; e < kPerLane; ++e) {
      if (first + e < size) quad.words[e] = bits_of(unit.load(row + first + e));
    }
    return quad;
  }
};

}  // namespace effinfer::cuda
