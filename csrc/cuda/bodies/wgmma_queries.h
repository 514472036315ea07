// A warpgroup's queries as the A operand of wgmma: 64 rows of 64 dims, swizzled, one such tile
// after the other.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/fragments.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

template <int kColumns>
struct WgmmaQueries {
  static constexpr int kRows = 64;
  static constexpr int kThreads = 128;
  static constexpr int kTileBytes = kRows * 128;
  static constexpr int kBytes = kColumns / 2 * kTileBytes;
  static constexpr int kPieces = kColumns * 4;  // of 8 dims, of a row

  // Of rows `first_row` on of the tile, by the warpgroup's threads together: for wgmma after a
  // barrier. Rows are scaled as in set_lane_queries() (bodies/prefill_rows.h), `rows` with them.
  template <DType kType, class Unit>
  EFFINFER_DEVICE static void set(Unit& unit, const ops::AttentionProblem& p,
                                  const ops::AttentionTile& tile, int first_row, TileRow* rows,
                                  uint8_t* to) {
    using Multiply = Products<kType, 1>;
    const int piece = unit.thread % kPieces;
    for (int row = unit.thread % kThreads / kPieces; row < kRows; row += kThreads / kPieces) {
      float x[8];
      EFFINFER_UNROLL
      for (int i = 0; i < 8; ++i)
        x[i] = query_of(p, tile, p.q.data, first_row + row, piece * 8 + i);
      float factor = query_sign(p);
      if constexpr (Multiply::kScalesQueries) {
        const float power = float_of(bits_of(row_highest(unit, x)) & 0x7f800000);
        if (power > 0.0f) {
          factor *= 1.0f / power;
          if (piece == 0) rows[row].scale *= power;
        }
      }
      Quad quad;
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        quad.words[i] = Multiply::rounded(unit, x[2 * i] * factor, x[2 * i + 1] * factor);
      }
      uint8_t* const tile_row = to + piece / 8 * kTileBytes + row * 128;
      *reinterpret_cast<Quad*>(tile_row + ((piece ^ row) & 7) * 16) = quad;
    }
    unit.fence_async();
  }

 private:
  // Over the lanes that have a row's pieces.
  template <class Unit>
  EFFINFER_DEVICE static float row_highest(Unit& unit, const float (&x)[8]) {
    float highest = 0.0f;
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) highest = fmaxf(highest, fabsf(x[i]));
    EFFINFER_UNROLL
    for (int mask = 1; mask < kPieces; mask *= 2) {
      highest = fmaxf(highest, unit.shfl_xor(highest, mask));
    }
    return highest;
  }
};

}  // namespace effinfer::cuda
