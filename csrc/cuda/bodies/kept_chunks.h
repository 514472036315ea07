// What a thread has of a row that several share: chunks of 16 bytes, in registers where they fit;
// and the sum of a row's squares.
#pragma once

#include <cmath>

#include "cuda/bodies/row_chunks.h"
#include "cuda/bodies/row_sum.h"

namespace effinfer::cuda {

// The chunks of a row that one of its `threads` has: number `thread`, and every `threads`th from
// there. kKept of them, if any, stay in registers, and there are no others; else each pass loads
// them again, and finds them in a cache.
template <class T, int kMostWarps, int kKept>
struct RowChunks {
  static constexpr int kNumbers = kChunk<T>;
  static constexpr bool kKeeps = kKept > 0;
  static constexpr int kPlaces = kKeeps ? kKept : 1;
  using Kept = float[kPlaces][kNumbers];

  // What kept chunks are made of, zeros where there is nothing.
  struct Asked {
    Quad x[kPlaces];
    Quad more[kPlaces];
  };

  const ops::ConstRows& x;
  const ops::ConstRows& add_to;  // of no data: none
  int cols;
  int thread;
  int threads;
  bool vectored;
  int row = 0;
  int group = 0;
  Kept kept = {};

  EFFINFER_DEVICE int first(int chunk) const { return (thread + chunk * threads) * kNumbers; }

  // All loads of a row are under way before the first of them is waited for.
  EFFINFER_DEVICE Asked ask(int asked_row, int asked_group) const {
    Asked asked = {};
    load_all(x.template at<const T>(asked_row, asked_group), asked.x);
    if (add_to.data != nullptr) {
      load_all(add_to.template at<const T>(asked_row, asked_group), asked.more);
    }
    return asked;
  }
  // The row that was asked for is the one at hand.
  template <class Unit>
  EFFINFER_DEVICE void take(Unit& unit, const Asked& asked) {
    EFFINFER_UNROLL
    for (int i = 0; i < kKept; ++i) decode<T>(unit, asked.x[i], kept[i]);
    if (add_to.data == nullptr) return;
    EFFINFER_UNROLL
    for (int i = 0; i < kKept; ++i) add(unit, asked.more[i], kept[i]);
  }

  // visit(first, numbers, chunk) for the thread's chunks that begin before `end`, in order; numbers
  // from `cols` on are zeros. Of those that are not kept chunk is 0.
  template <class Unit, class Visit>
  EFFINFER_DEVICE void for_each(Unit& unit, int end, Visit&& visit) {
    if constexpr (kKeeps) {
      EFFINFER_UNROLL
      for (int i = 0; i < kKept; ++i) {
        if (first(i) < end) visit(first(i), kept[i], i);
      }
    } else {
      EFFINFER_NO_UNROLL
      for (int i = first(0); i < end; i += threads * kNumbers) {
        decode<T>(unit, load_chunk(x.template at<const T>(row, group), i, cols, vectored), kept[0]);
        if (add_to.data != nullptr) {
          const T* more = add_to.template at<const T>(row, group);
          add(unit, load_chunk(more, i, cols, vectored), kept[0]);
        }
        visit(i, kept[0], 0);
      }
    }
  }

 private:
  EFFINFER_DEVICE void load_all(const T* from, Quad (&raw)[kPlaces]) const {
    if (vectored) {
      EFFINFER_UNROLL
      for (int i = 0; i < kKept; ++i) raw[i] = load_whole(from, first(i), cols);
    } else {
      EFFINFER_UNROLL
      for (int i = 0; i < kKept; ++i) raw[i] = load_parts(from, first(i), cols);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE static void add(Unit& unit, const Quad& raw, float (&numbers)[kNumbers]) {
    float more[kNumbers];
    decode<T>(unit, raw, more);
    EFFINFER_UNROLL
    for (int e = 0; e < kNumbers; ++e) numbers[e] += more[e];
  }
};

// 1 / sqrt(mean(x^2) + eps). A thread's squares are four sums, which do not wait for each other.
template <int kMostWarps, class Unit, class Chunks>
EFFINFER_DEVICE float rms_scale(Unit& unit, Chunks& chunks, float per_col, float eps,
                                RowPartials<kMostWarps>& partials) {
  float squares[4] = {};
  chunks.for_each(unit, chunks.cols, [&](int, const float (&x)[Chunks::kNumbers], int) {
    EFFINFER_UNROLL
    for (int e = 0; e < Chunks::kNumbers; ++e) {
      squares[e % 4] = fmaf(x[e], x[e], squares[e % 4]);
    }
  });
  const float own = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  const float sum = row_sum(unit, own, chunks.threads / kWarp, partials);
  return unit.reciprocal(sqrtf(fmaf(sum, per_col, eps)));
}

}  // namespace effinfer::cuda
