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
#include "cuda/bodies/tile_scales.h"
#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// The weights of a block of 32 k of a lane's rows.
struct TileFragments {
  uint32_t a[2][2][4];  // by pair, step
};

// The quants of a load in registers. bytes(b, j, row) are four of one row.
template <ops::QuantBits kBits>
struct TileQuants;

template <>
struct TileQuants<ops::QuantBits::u4> {
  Quad low[2];  // by j

  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const uint8_t* superblock, int, int t, int quad) {
    EFFINFER_UNROLL
    for (int j = 0; j < 2; ++j) {
      low[j] = unit.load(reinterpret_cast<const Quad*>(superblock + (2 * t + j) * 64 + quad * 16));
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
  Quad high[2];  // by b

  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const uint8_t* superblock, int, int t, int quad) {
    low.load(unit, superblock, 0, t, quad);
    EFFINFER_UNROLL
    for (int b = 0; b < 2; ++b) {
      high[b] = unit.load(reinterpret_cast<const Quad*>(superblock + (8 + b) * 64 + quad * 16));
    }
  }
  EFFINFER_DEVICE uint32_t bytes(int b, int j, int row, int t) const {
    return low.bytes(b, j, row, t) | (high[b].words[row] << (6 - 2 * t) >> (2 + j) & 0x10101010u);
  }
};

// High line 2 b + n / 4 holds bits 4 and 5 of field line 8 b + n at bits 2 (n % 4) of a byte: the
// lane's are bits 4 (t % 2) + 2 j.
template <>
struct TileQuants<ops::QuantBits::u6> {
  TileQuants<ops::QuantBits::u4> low;
  Quad high[2];  // by b

  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const uint8_t* superblock, int, int t, int quad) {
    low.load(unit, superblock, 0, t, quad);
    EFFINFER_UNROLL
    for (int b = 0; b < 2; ++b) {
      high[b] = unit.load(
          reinterpret_cast<const Quad*>(superblock + (8 + 2 * b + t / 2) * 64 + quad * 16));
    }
  }
  EFFINFER_DEVICE uint32_t bytes(int b, int j, int row, int t) const {
    return low.bytes(b, j, row, t) |
           (high[b].words[row] << (4 - 4 * (t % 2)) >> 2 * j & 0x30303030u);
  }
};

template <>
struct TileQuants<ops::QuantBits::u8> {
  Quad lines[2][2];  // by b, j

  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const uint8_t* superblock, int, int t, int quad) {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      lines[i / 2][i % 2] = unit.load(
          reinterpret_cast<const Quad*>(superblock + (i / 2 * 8 + 2 * t + i % 2) * 64 + quad * 16));
    }
  }
  EFFINFER_DEVICE uint32_t bytes(int b, int j, int row, int) const {
    return lines[b][j].words[row];
  }
};

// Where a lane's rows lie in a weight. Offsets have 32 bits: few registers hold them while sums
// take most.
struct TilePlace {
  const uint8_t* group;
  uint32_t header_bytes;  // of a group
  uint32_t header_row;    // bytes of its scales
};

template <ops::PackedFormat kFormat>
EFFINFER_DEVICE const uint8_t* tile_superblock(const TilePlace& place, uint32_t index) {
  return place.group +
         (place.header_bytes + index * static_cast<uint32_t>(ops::superblock_bytes(kFormat)));
}

// A load of a lane's weights, as they lie. load() takes block `first` of superblock `index`, or all
// of it; unpack() makes the fragments [step] of a block and a pair of rows.
template <ops::PackedFormat kFormat>
struct TileWeights {
  static constexpr int kLoaded = tile_load_blocks(kFormat.bits);
  TileQuants<kFormat.bits> quants;
  TileScales<kFormat> scales;

  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const TilePlace& place, uint32_t index, int first) {
    const int t = unit.lane % 4;
    const int quad = unit.lane / 4 % 4;
    const uint8_t* superblock = tile_superblock<kFormat>(place, index);
    quants.load(unit, superblock, first, t, quad);
    constexpr uint32_t kHeaderSuperblocks = ops::kHeaderBlock / ops::kSuperblock;
    const uint32_t header = index / kHeaderSuperblocks * (ops::kGroupRows * 2) + quad * 8;
    scales.load(unit, superblock, place.group + header, place.header_row, first, t, quad);
  }

  template <class Unit>
  EFFINFER_DEVICE void unpack(Unit& unit, int b, int pair, int t, uint32_t (&a)[2][4]) const {
    const TileAffine affine = scales.affine(unit, b % kLoaded, pair);
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
  static constexpr int kLoaded = 1;
  TileFragments fragments;

  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const TilePlace& place, uint32_t index, int first) {
    const uint8_t* from =
        tile_superblock<kDenseBf16>(place, index) + unit.lane % 4 * 256 + unit.lane / 4 % 4 * 16;
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {  // of a step, line and pair
      const uint8_t* two = from + (first * 8 + i / 4) * 128 + i / 2 % 2 * 64 + i % 2 * 8;
      const auto rows = unit.load(reinterpret_cast<const uint64_t*>(two));
      uint32_t (&a)[4] = fragments.a[i % 2][i / 4];
      a[i / 2 % 2 * 2] = static_cast<uint32_t>(rows);
      a[i / 2 % 2 * 2 + 1] = static_cast<uint32_t>(rows >> 32);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE void unpack(Unit&, int, int pair, int, uint32_t (&a)[2][4]) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = fragments.a[pair][i / 4][i % 4];
  }
};

// Half a line is one k of 16 rows.
template <>
struct TileWeights<kDenseF16> {
  static constexpr int kLoaded = 1;
  uint64_t rows[2][4];  // by j, k

  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const TilePlace& place, uint32_t index, int first) {
    const uint8_t* from =
        tile_superblock<kDenseF16>(place, index) + unit.lane % 4 * 256 + unit.lane / 4 % 4 * 8;
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      rows[i / 4][i % 4] = unit.load(
          reinterpret_cast<const uint64_t*>(from + (first * 8 + i / 4) * 128 + i % 4 * 32));
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
