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
  static constexpr int kRowStep = kThreads / kPieces;
  static constexpr int kOwn = kRows / kRowStep;  // pieces of a thread

  // Of rows `first_row` on of the tile, by the warpgroup's threads together: for wgmma after a
  // barrier. Rows are scaled as in set_lane_queries() (bodies/prefill_rows.h), `rows` with them.
  template <DType kType, class Unit>
  EFFINFER_DEVICE static void set(Unit& unit, const ops::AttentionProblem& p,
                                  const ops::AttentionTile& tile, int first_row, TileRow* rows,
                                  uint8_t* to) {
    using Multiply = Products<kType, 1>;
    const int piece = unit.thread % kPieces;
    const int own_row = unit.thread % kThreads / kPieces;
    Quad own[kOwn][2];
    load(unit, p, tile, first_row + own_row, piece * 8, own);
    EFFINFER_UNROLL
    for (int r = 0; r < kOwn; ++r) {
      const int row = own_row + r * kRowStep;
      float x[8];
      decode(unit, p.q.dtype, own[r], x);
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
  // Eight dims of each of the thread's rows, zeros of those that are not there: all are on their
  // way before anybody looks at one.
  template <class Unit>
  EFFINFER_DEVICE static void load(Unit& unit, const ops::AttentionProblem& p,
                                   const ops::AttentionTile& tile, int first_row, int dim,
                                   Quad (&to)[kOwn][2]) {
    const bool wide = p.q.dtype == DType::f32;
    const int heads = tile.num_heads;
    const int rows = tile.num_rows * heads;
    // Looked up once, whether or not a row is there.
    const uint8_t* const first =
        p.q.data + (tile.first_row * p.q.row_stride + tile.first_head * p.q.head_stride + dim) *
                       (wide ? 4 : 2);
    int token = first_row / heads;
    int head = first_row % heads;
    EFFINFER_UNROLL
    for (int r = 0; r < kOwn; ++r) {
      to[r][0] = to[r][1] = Quad{};
      if (first_row + r * kRowStep < rows) {
        const int64_t at = token * p.q.row_stride + head * p.q.head_stride;
        const auto* from = reinterpret_cast<const Quad*>(first + at * (wide ? 4 : 2));
        to[r][0] = unit.load(from);
        if (wide) to[r][1] = unit.load(from + 1);
      }
      // kRowStep rows on.
      token += kRowStep / heads;
      head += kRowStep % heads;
      if (head < heads) continue;
      head -= heads;
      ++token;
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void decode(Unit& unit, DType dtype, const Quad (&quads)[2],
                                     float (&x)[8]) {
    if (dtype == DType::f32) {
      EFFINFER_UNROLL
      for (int i = 0; i < 8; ++i) x[i] = float_of(quads[i / 4].words[i % 4]);
      return;
    }
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint32_t half = quads[0].words[i / 2] >> i % 2 * 16;
      const float number = unit.from_f16(static_cast<uint16_t>(half));
      x[i] = dtype == DType::bf16 ? float_of(half << 16) : number;
    }
  }

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
