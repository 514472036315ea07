// Packed weights (ops/packed_weight.h) as A fragments of mma.m16n8k16 in bfloat16, scales and
// minima included: what kernels of many tokens multiply. Each number is made in float32 and rounded
// once, to nearest even, as the panels of the CPU are.
//
// A warp multiplies 32 rows: two groups. Lane (g, t) = (lane / 4, lane % 4) has the four rows
// 4 (g % 4) .. 4 (g % 4) + 3 of group g / 4, and of each block of 32 k the eight from 8 t on, since
// the rows and the k of a product may be named in any order:
//
//   block b = 0, 1   32 k of a superblock, of which the lane has 32 b + 8 t .. 32 b + 8 t + 7
//   step j = 0, 1    one mma: the lane's k = 32 b + 8 t + 4 j + {0, 1} are in registers 0 and 1,
//   and
//                    + {2, 3} in 2 and 3
//   pair p = 0, 1    two of the lane's four rows: fragment row g is its row 2 p (registers 0, 2),
//                    fragment row g + 8 its row 2 p + 1 (registers 1, 3)
//
// So the B fragments of both steps of a token are 16 bytes as they lie: its bfloat16
// x[32 b + 8 t .. 32 b + 8 t + 7]. (stream_matmul.h has four k a lane, because it multiplies by a
// scale after each 16 or 32 k; here the lane's eight are always under one scale.)
//
// Four k are one field line of a superblock: 8 b + 2 t + j.
#pragma once

#include "cuda/bodies/dequant.h"
#include "cuda/bodies/tile_ring.h"
#include "cuda/bodies/tile_scales.h"
#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// The weights of a block of 32 k of a lane's rows.
struct TileFragments {
  uint32_t a[2][2][4];  // by pair, step
};

// The pieces of 16 bytes in which a lane copies quants to a place of tile_ring.h: what lies next
// to each other, for lanes that go to memory together to ask for whole lines. Of each block those
// of a t are 128 bytes, or 256 of dense weights. Their 32 bytes j are moved to places j ^ t of the
// 128, so that the reads of four t meet all banks.
template <ops::QuantBits kBits>
struct TilePieces {
  static constexpr bool kIsF16 = kBits == ops::QuantBits::f16;
  static constexpr bool kIsDense = kIsF16 || kBits == ops::QuantBits::bf16;

  static constexpr int from(int lane) { return lane % 16 * 16; }
  static constexpr int to(int lane) {
    return lane / 16 * 256 + (lane % 16 * 16 ^ (kIsDense ? 0 : lane / 8 % 2 * 32));
  }
  static constexpr int next(int i) { return i * 256; }
  static constexpr int to(int i, int first) {
    return i * kPieceStep + (first ^ (kIsDense ? i * 32 : i % 2 * 64));
  }
  // Where a lane reads its rows in the line that begins at byte `line` of those of its t.
  static constexpr int read_at(int lane, int line) {
    const int t = lane % 4;
    const int first = kIsDense ? t * kPieceStep : t / 2 * kPieceStep + t % 2 * 128;
    const int rows = lane / 4 % 4 * (kIsF16 ? 8 : 16);
    return first + lane / 16 * 256 + line / 128 * 128 + ((line % 128 + rows) ^ t * 32);
  }
};

// The quants of a block in registers. bytes(b, j, row) are four of one row.
template <ops::QuantBits kBits>
struct TileQuants;

// From a lane's group of a place: line n of the high bits.
EFFINFER_DEVICE Quad high_line(const uint8_t* high, int line) {
  return *reinterpret_cast<const Quad*>(high + line * 64);
}

template <>
struct TileQuants<ops::QuantBits::u4> {
  Quad low[2];  // by j

  EFFINFER_DEVICE void load(const uint8_t* place, const uint8_t*, int, int lane) {
    using Pieces = TilePieces<ops::QuantBits::u4>;
    EFFINFER_UNROLL
    for (int j = 0; j < 2; ++j) {
      low[j] = *reinterpret_cast<const Quad*>(place + Pieces::read_at(lane, j * 64));
    }
  }
  EFFINFER_DEVICE uint32_t bytes(int b, int j, int row, int) const {
    return low[j].words[row] >> 4 * b & 0x0f0f0f0fu;
  }
};

// High line b holds bit 4 of field line 8 b + n at bit n of a byte: the lane's are bits 2 t + j.
template <>
struct TileQuants<ops::QuantBits::u5> {
  TileQuants<ops::QuantBits::u4> low;
  Quad high;

  EFFINFER_DEVICE void load(const uint8_t* place, const uint8_t* lines, int b, int lane) {
    low.load(place, lines, b, lane);
    high = high_line(lines, b);
  }
  EFFINFER_DEVICE uint32_t bytes(int b, int j, int row, int t) const {
    return low.bytes(b, j, row, t) | (high.words[row] << (6 - 2 * t) >> (2 + j) & 0x10101010u);
  }
};

// High line 2 b + n / 4 holds bits 4 and 5 of field line 8 b + n at bits 2 (n % 4) of a byte: the
// lane's are bits 4 (t % 2) + 2 j.
template <>
struct TileQuants<ops::QuantBits::u6> {
  TileQuants<ops::QuantBits::u4> low;
  Quad high;

  EFFINFER_DEVICE void load(const uint8_t* place, const uint8_t* lines, int b, int lane) {
    low.load(place, lines, b, lane);
    high = high_line(lines, 2 * b + lane % 4 / 2);
  }
  EFFINFER_DEVICE uint32_t bytes(int b, int j, int row, int t) const {
    return low.bytes(b, j, row, t) | (high.words[row] << (4 - 4 * (t % 2)) >> 2 * j & 0x30303030u);
  }
};

template <>
struct TileQuants<ops::QuantBits::u8> {
  Quad lines[2];  // by j

  EFFINFER_DEVICE void load(const uint8_t* place, const uint8_t*, int b, int lane) {
    using Pieces = TilePieces<ops::QuantBits::u8>;
    EFFINFER_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint8_t* from = place + b * 2 * kPieceStep;
      lines[j] = *reinterpret_cast<const Quad*>(from + Pieces::read_at(lane, j * 64));
    }
  }
  EFFINFER_DEVICE uint32_t bytes(int, int j, int row, int) const { return lines[j].words[row]; }
};

// A lane's weights of a block of 32 k, as they lie in a place of tile_ring.h, which has a
// superblock, or of dense weights a block. load() takes block b; unpack() makes the fragments
// [step] of a pair of rows.
template <ops::PackedFormat kFormat>
struct TileWeights {
  TileQuants<kFormat.bits> quants;
  TileScales<kFormat> scales;

  EFFINFER_DEVICE void load(const uint8_t* place, int b, int lane) {
    quants.load(place, high_lines<kFormat>(place, lane), b, lane);
    load_scales<kFormat>(place, lane, scales, b, lane % 4);
  }

  template <class Unit>
  EFFINFER_DEVICE void unpack(Unit& unit, int b, int pair, int t, uint32_t (&a)[2][4]) const {
    const TileAffine affine = scales.affine(unit, pair);
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t bytes = quants.bytes(b, i / 2, 2 * pair + i % 2, t);
      float values[4];
      EFFINFER_UNROLL
      for (uint32_t e = 0; e < 4; ++e) {
        values[e] = number(unit, bytes, e, affine.scale[i % 2], affine.offset[i % 2]);
      }
      a[i / 2][i % 2] = unit.bf16x2(values[0], values[1]);
      a[i / 2][2 + i % 2] = unit.bf16x2(values[2], values[3]);
    }
  }

 private:
  // A byte q beside constant ones is a float that is kBase more: 0x43 q 0 0 is 2^7 + q for q below
  // 128, 0x47 0 q 0 is 2^15 + q for any.
  template <class Unit>
  EFFINFER_DEVICE static float number(Unit& unit, uint32_t bytes, uint32_t e, float scale,
                                      float offset) {
    using Scales = TileScales<kFormat>;
    if constexpr (kFormat.bits == ops::QuantBits::u8) {
      const float value = float_of(unit.permute(bytes, 0x47000000u, 0x7404u | e << 4));
      if constexpr (Scales::kFused) return fmaf(scale, value, offset);
      return scale * (value - (Scales::kBase + static_cast<float>(kFormat.zero)));
    } else {
      return fmaf(scale, float_of(unit.permute(bytes, 0x43000000u, 0x7044u | e << 8)), offset);
    }
  }
};

// A line holds two k of 16 rows: two lines for four k. These bytes are fragments as they lie.
template <>
struct TileWeights<kDenseBf16> {
  Quad lines[2][2];  // by j, line

  EFFINFER_DEVICE void load(const uint8_t* place, int, int lane) {
    using Pieces = TilePieces<ops::QuantBits::bf16>;
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      lines[i / 2][i % 2] = *reinterpret_cast<const Quad*>(place + Pieces::read_at(lane, i * 64));
    }
  }
  template <class Unit>
  EFFINFER_DEVICE void unpack(Unit&, int, int pair, int, uint32_t (&a)[2][4]) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = lines[i / 4][i % 4 / 2].words[2 * pair + i % 2];
  }
};

// Half a line is one k of 16 rows.
template <>
struct TileWeights<kDenseF16> {
  uint64_t rows[2][4];  // by j, k

  EFFINFER_DEVICE void load(const uint8_t* place, int, int lane) {
    using Pieces = TilePieces<ops::QuantBits::f16>;
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      rows[i / 4][i % 4] =
          *reinterpret_cast<const uint64_t*>(place + Pieces::read_at(lane, i * 32));
    }
  }
  template <class Unit>
  EFFINFER_DEVICE void unpack(Unit& unit, int, int pair, int, uint32_t (&a)[2][4]) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int row = 2 * pair + i % 2;
      const uint64_t (&four)[4] = rows[i / 4];
      a[i / 4][i % 4] = unit.bf16x2(half_of(unit, four[i % 4 / 2 * 2], row),
                                    half_of(unit, four[i % 4 / 2 * 2 + 1], row));
    }
  }
};

}  // namespace effinfer::cuda
