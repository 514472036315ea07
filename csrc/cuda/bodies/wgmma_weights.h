// Packed weights (ops/packed_weight.h) as A fragments of wgmma in registers: bfloat16, scales and
// minima included, each number made in float32 and rounded once.
//
// A warp has 32 rows of two m64 products, 16 of each: lane (g, t) = (lane / 4, lane % 4) has rows
// 4 (g % 4) .. 4 (g % 4) + 3 of group g / 4, of which two are those of a fragment (dequant.h). But
// the k of a product may not be named in any order: its B operand is rows of activations in shared
// memory, as the tensor map brings them. A fragment of step s = 0..3 wants, of each row,
//
//   k = 16 s + 2 t + {0, 1}      registers 0 and 1
//   k = 16 s + 2 t + {8, 9}      registers 2 and 3
//
// and a dword of quants has four k. So lanes t = 1 and 2 change places: lane t reads the dwords of
// k = 16 s + 4 u .. + 3 with u = 0, 2, 1, 3. Of the sixteen k
//
//   lane t      0               1               2               3
//   has         0  1  2  3      8  9 10 11      4  5  6  7     12 13 14 15
//   wants       0  1  8  9      2  3 10 11      4  5 12 13      6  7 14 15
//
// that is two that it has and two of its neighbour t ^ 1: a shuffle and a permutation of bytes.
// Dense weights have at most two k to a dword, and each lane reads what it wants.
#pragma once

#include <type_traits>

#include "cuda/bodies/stream_ring.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

constexpr int swapped(int t) {
  return t % 2 * 2 + t / 2;
}

// What a lane copies to a place of stream_ring.h: what it wants.
template <ops::QuantBits kBits>
struct WgmmaPieces : LanePieces<kBits> {
  static constexpr bool kIsBf16 = kBits == ops::QuantBits::bf16;

  static constexpr int from(int lane) {
    if (kIsBf16) return lane % 4 * 64 + lane / 4 % 4 * 16;
    if (kBits == ops::QuantBits::f16) return LanePieces<kBits>::from(lane);
    return LanePieces<kBits>::from(lane / 4 * 4 + swapped(lane % 4));
  }
  static constexpr int next(int i) {
    return kIsBf16 ? i / 2 * 512 + i % 2 * 256 : LanePieces<kBits>::next(i);
  }
};

// A lane's weights of a superblock.
template <ops::PackedFormat kFormat>
struct WgmmaWeights {
  static constexpr bool kSuper = kFormat.scales == ops::ScaleKind::super;
  static constexpr bool kWide = kFormat.bits == ops::QuantBits::u8;
  static constexpr int kBlockSteps = kFormat.sub_block == 16 ? 1 : 2;  // under one scale
  // A byte q beside constant ones is a float that is kBase more: 0x43 q 0 0 is 2^7 + q for q below
  // 128, 0x47 0 q 0 is 2^15 + q for any.
  static constexpr float kBase = kWide ? 0x1p15f : 0x1p7f;
  static constexpr float kZero = kBase + static_cast<float>(kFormat.zero);
  // Whether a scale times kZero is a float: not where a scale of 19 bits meets 9 more.
  static constexpr bool kFused = !(kSuper && kWide);

  // Whether fragments are the loaded registers themselves.
  static constexpr bool kMultipliesLoaded = false;

  Quants<kFormat.bits> quants;
  WeightScales<kFormat> scales;

  // Of rows in one block of k: number = scale q + offset.
  struct Affine {
    float scale[4];
    float offset[4];
  };

  // Place `part` of a superblock's.
  EFFINFER_DEVICE void load(const uint8_t* place, int, int lane) {
    quants.load(ring_place<kFormat>(place, lane));
    load_scales<kFormat>(place, lane, scales);
  }

  template <class Unit>
  EFFINFER_DEVICE Affine affine(Unit& unit, int step) const {
    Affine out;
    EFFINFER_UNROLL
    for (int row = 0; row < 4; ++row) {
      const int block = step / kBlockSteps;
      out.scale[row] = scales.scale(unit, block, row);
      float minimum = 0.0f;
      if constexpr (kFormat.has_min) minimum = scales.minimum(unit, block, row);
      out.offset[row] = kFused ? fmaf(-out.scale[row], kZero, minimum) : 0.0f;
    }
    return out;
  }

  // The fragments of both pairs of rows.
  template <class Unit>
  EFFINFER_DEVICE void fragments(Unit& unit, const Affine& affine, int step, int t,
                                 uint32_t (&a)[2][4]) const {
    EFFINFER_UNROLL
    for (int row = 0; row < 4; ++row) {
      const uint32_t mine = bytes(step, row, swapped(t));
      const uint32_t theirs = unit.shfl_xor(mine, 1);
      const uint32_t four = unit.permute(mine, theirs, t % 2 == 0 ? 0x5410u : 0x3276u);
      float numbers[4];
      EFFINFER_UNROLL
      for (uint32_t i = 0; i < 4; ++i) {
        numbers[i] = number(unit, four, i, affine.scale[row], affine.offset[row]);
      }
      a[row / 2][row % 2] = unit.bf16x2(numbers[0], numbers[1]);
      a[row / 2][2 + row % 2] = unit.bf16x2(numbers[2], numbers[3]);
    }
  }

 private:
  EFFINFER_DEVICE uint32_t bytes(int step, int row, int t) const {
    if constexpr (kWide) {
      return quants.lines[step].words[row];
    } else {
      return quants.bytes(step, row, t);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static float number(Unit& unit, uint32_t bytes, uint32_t index, float scale,
                                      float offset) {
    if constexpr (kWide) {
      const float value = float_of(unit.permute(bytes, 0x47000000u, 0x7404u | index << 4));
      return kFused ? fmaf(scale, value, offset) : scale * (value - kZero);
    } else {
      const uint32_t bits = unit.permute(bytes, 0x43000000u, 0x7044u | index << 8);
      return fmaf(scale, float_of(bits), offset);
    }
  }
};

// Dense weights have no scales.
struct NoAffine {};

// A line holds two k of 16 rows.
template <>
struct WgmmaWeights<kDenseBf16> {
  static constexpr int kBlockSteps = 4;
  static constexpr bool kMultipliesLoaded = true;
  using Affine = NoAffine;
  Quad lines[4][2];

  EFFINFER_DEVICE void load(const uint8_t* place, int part, int lane) {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      lines[2 * part + i / 2][i % 2] =
          *reinterpret_cast<const Quad*>(place + lane * 16 + i * kPieceStep);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE Affine affine(Unit&, int) const {
    return {};
  }
  template <class Unit>
  EFFINFER_DEVICE void fragments(Unit&, const Affine&, int step, int, uint32_t (&a)[2][4]) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = lines[step][i % 4 / 2].words[i / 4 * 2 + i % 2];
  }
};

// Half a line is one k of 16 rows: loads of 8 bytes.
template <>
struct WgmmaWeights<kDenseF16> {
  static constexpr int kBlockSteps = 4;
  static constexpr bool kMultipliesLoaded = false;
  using Affine = NoAffine;
  uint64_t rows[4][4];  // by step, k

  // Where LanePieces puts 8 bytes of k = 2 t + {0, 1} and 8 more.
  EFFINFER_DEVICE void load(const uint8_t* place, int part, int lane) {
    const int t = lane % 4;
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int piece = i / 2;
      const int at = (t * 64 + i % 2 * 32 + lane / 4 % 4 * 8) ^ (piece % 2 * 2 + t / 2) * 32;
      rows[2 * part + i / 4][i % 4] =
          *reinterpret_cast<const uint64_t*>(place + piece * kPieceStep + lane / 16 * 256 + at);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE Affine affine(Unit&, int) const {
    return {};
  }
  template <class Unit>
  EFFINFER_DEVICE void fragments(Unit& unit, const Affine&, int step, int,
                                 uint32_t (&a)[2][4]) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int row = i / 4 * 2 + i % 2;
      const int k = i % 4 / 2 * 2;
      a[i / 4][i % 4] =
          unit.bf16x2(half_of(unit, rows[step][k], row), half_of(unit, rows[step][k + 1], row));
    }
  }
};

}  // namespace effinfer::cuda
