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
  static constexpr int kTileBytes = kRows * 128;
  static constexpr int kBytes = kColumns / 2 * kTileBytes;
  static constexpr int kPieces = kColumns * 4;       // of 8 dims, of a row
  static constexpr int kRowStep = kWarp / kPieces;   // rows that a warp has at once
  static constexpr int kOwn = kTileRows / kRowStep;  // pieces of a lane
  using Pieces = Quad[kOwn][2];

  // A warp's 16 rows, from `first_row` of the tile on, on their way; zeros of those that are not
  // there.
  template <class Unit>
  EFFINFER_DEVICE static void load(Unit& unit, const ops::AttentionProblem& p,
                                   const ops::AttentionTile& tile, int first_row, Pieces& to) {
    const bool wide = p.q.dtype == DType::f32;
    const int bytes = wide ? 4 : 2;
    const int heads = tile.num_heads;
    const int own_row = first_row + unit.lane / kPieces;
    int left = tile.num_rows * heads - own_row;  // rows
    int head = own_row % heads;
    const uint8_t* from =
        p.q.data + bytes * ((tile.first_row + own_row / heads) * p.q.row_stride +
                            (tile.first_head + head) * p.q.head_stride + unit.lane % kPieces * 8);
    // From a row to that kRowStep rows on, and what is more where that is another token's.
    const int64_t step =
        bytes * (kRowStep / heads * p.q.row_stride + kRowStep % heads * p.q.head_stride);
    const int64_t turn = bytes * (p.q.row_stride - heads * p.q.head_stride);
    EFFINFER_UNROLL
    for (int r = 0; r < kOwn; ++r) {
      to[r][0] = to[r][1] = Quad{};
      if (left > 0) {
        to[r][0] = unit.load(reinterpret_cast<const Quad*>(from));
        if (wide) to[r][1] = unit.load(reinterpret_cast<const Quad*>(from) + 1);
      }
      left -= kRowStep;
      from += step;
      head += kRowStep % heads;
      if (head < heads) continue;
      head -= heads;
      from += turn;
    }
  }

  // To rows 16 `warp` on of the warpgroup's: for wgmma after a barrier of these. Rows are scaled as
  // in set_lane_queries() (bodies/prefill_rows.h); returns what with, of row `lane` of the warp.
  template <DType kType, class Unit>
  EFFINFER_DEVICE static float store(Unit& unit, const ops::AttentionProblem& p,
                                     const Pieces& pieces, int warp, uint8_t* to) {
    const float sign = query_sign(p);
    float own_power = 1.0f;
    if (!Products<kType, 1>::kScalesQueries && p.q.dtype == kType && sign == 1.0f) {
      EFFINFER_UNROLL
      for (int r = 0; r < kOwn; ++r) put(unit, warp, r, pieces[r][0], to);
    } else if (p.q.dtype == DType::f32) {
      own_power = round<kType, DType::f32>(unit, sign, pieces, warp, to);
    } else if (p.q.dtype == DType::bf16) {
      own_power = round<kType, DType::bf16>(unit, sign, pieces, warp, to);
    } else {
      own_power = round<kType, DType::f16>(unit, sign, pieces, warp, to);
    }
    unit.fence_async();
    return own_power;
  }

 private:
  // Piece `r` of the lane.
  template <class Unit>
  EFFINFER_DEVICE static void put(Unit& unit, int warp, int r, const Quad& quad, uint8_t* to) {
    const int piece = unit.lane % kPieces;
    const int row = warp * kTileRows + unit.lane / kPieces + r * kRowStep;
    uint8_t* const tile_row = to + piece / 8 * kTileBytes + row * 128;
    *reinterpret_cast<Quad*>(tile_row + ((piece ^ row) & 7) * 16) = quad;
  }

  template <DType kType, DType kFrom, class Unit>
  EFFINFER_DEVICE static float round(Unit& unit, float sign, const Pieces& pieces, int warp,
                                     uint8_t* to) {
    using Multiply = Products<kType, 1>;
    float own_power = 1.0f;
    EFFINFER_UNROLL
    for (int r = 0; r < kOwn; ++r) {
      float x[8];
      decode<kFrom>(unit, pieces[r], x);
      float factor = sign;
      if constexpr (Multiply::kScalesQueries) {
        // A power of two up to 2^126, whose inverse follows from its exponent.
        uint32_t bits = bits_of(row_highest(unit, x)) & 0x7f800000;
        if (bits == 0) bits = bits_of(1.0f);
        if (bits > 253u << 23) bits = 253u << 23;
        factor *= float_of((254u << 23) - bits);
        const float of_row = unit.shfl(float_of(bits), unit.lane % kRowStep * kPieces);
        if (unit.lane / kRowStep == r) own_power = of_row;
      }
      Quad quad;
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        quad.words[i] = Multiply::rounded(unit, x[2 * i] * factor, x[2 * i + 1] * factor);
      }
      put(unit, warp, r, quad, to);
    }
    return own_power;
  }

  template <DType kFrom, class Unit>
  EFFINFER_DEVICE static void decode(Unit& unit, const Quad (&quads)[2], float (&x)[8]) {
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      if constexpr (kFrom == DType::f32) {
        x[i] = float_of(quads[i / 4].words[i % 4]);
      } else {
        const uint32_t half = quads[0].words[i / 2] >> i % 2 * 16;
        x[i] = kFrom == DType::bf16 ? float_of(half << 16)
                                    : unit.from_f16(static_cast<uint16_t>(half));
      }
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
