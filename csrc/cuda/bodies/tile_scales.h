// Scales and minima of packed weights as tile_weights.h takes them.
#pragma once

#include <cmath>

#include "cuda/bodies/weight_scales.h"
#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// What makes numbers of the quants of a pair of a lane's rows in one block of 32 k.
struct TileAffine {
  float scale[2];
  float offset[2];
};

// Scales and minima of the lane's rows in one block of 32 k, in registers.
template <ops::PackedFormat kFormat>
struct TileScales {
  static constexpr bool kSuper = kFormat.scales == ops::ScaleKind::super;
  static constexpr int kSubBlocks = 32 / kFormat.sub_block;  // of a block of 32 k
  static_assert(kSuper || kSubBlocks == 1);
  // What a quant's float has too much, by which it is made (TileWeights).
  static constexpr float kBase = kFormat.bits == ops::QuantBits::u8 ? 0x1p15f : 0x1p7f;
  // Whether a scale times kBase + zero is a float: not where a scale of 19 bits meets 9 more.
  static constexpr bool kFused = !(kSuper && kFormat.bits == ops::QuantBits::u8);
  static constexpr int kRowBytes = kSuper ? 4 : 8;  // of four rows in one block

  struct Numbers {
    uint64_t halves;
    uint32_t bytes;  // of super formats
  };
  Numbers scales;
  Numbers minima;

  // Of block b, where `first` are the lane's rows of the first block and `header` the f16 of the
  // same rows, of which a row has 32 bytes. Of two blocks in 32 k the lane's are in one.
  EFFINFER_DEVICE void load(const uint8_t* first, const uint8_t* header, int b, int t) {
    const int block = kSubBlocks * b + (kSubBlocks == 2 ? t / 2 : 0);
    first += block * (ops::kGroupRows / 4 * kRowBytes);
    load(first, header, scales);
    if constexpr (kFormat.has_min) {
      constexpr int64_t kMinima = ops::min_offset(kFormat) - ops::quant_bytes(kFormat.bits);
      load(first + kMinima, header + ops::kGroupRows * 2, minima);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE TileAffine affine(Unit& unit, int pair) const {
    TileAffine out;
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * pair + i;
      float minimum = 0.0f;
      if constexpr (kSuper) {
        out.scale[i] = times_byte(unit, half_of(unit, scales.halves, row),
                                  scales.bytes ^ 0x80808080u, row, 128.0f);
        if constexpr (kFormat.has_min) {
          minimum = times_byte(unit, -half_of(unit, minima.halves, row), minima.bytes, row, 0.0f);
        }
      } else {
        out.scale[i] = half_of(unit, scales.halves, row);
        if constexpr (kFormat.has_min) minimum = half_of(unit, minima.halves, row);
      }
      constexpr float kZero = kBase + static_cast<float>(kFormat.zero);
      out.offset[i] = kFused ? fmaf(-out.scale[i], kZero, minimum) : 0.0f;
    }
    return out;
  }

 private:
  EFFINFER_DEVICE static void load(const uint8_t* first, const uint8_t* header, Numbers& out) {
    if constexpr (kSuper) {
      out.bytes = *reinterpret_cast<const uint32_t*>(first);
      out.halves = *reinterpret_cast<const uint64_t*>(header);
    } else {
      out.halves = *reinterpret_cast<const uint64_t*>(first);
    }
  }
};

}  // namespace effinfer::cuda
