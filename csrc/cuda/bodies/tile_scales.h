// Scales and minima of packed weights as tile_weights.h takes them.
#pragma once

#include <cmath>

#include "cuda/bodies/weight_scales.h"
#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// How many blocks of 32 k a load brings: of fewer than eight bits, which both share, a
// superblock's.
constexpr int tile_load_blocks(ops::QuantBits bits) {
  return bits == ops::QuantBits::u4 || bits == ops::QuantBits::u5 || bits == ops::QuantBits::u6 ? 2
                                                                                                : 1;
}

// What makes numbers of the quants of a pair of a lane's rows in one block of 32 k.
struct TileAffine {
  float scale[2];
  float offset[2];
};

// Scales and minima of a load in registers: of the lane's rows and k.
template <ops::PackedFormat kFormat>
struct TileScales {
  static constexpr bool kSuper = kFormat.scales == ops::ScaleKind::super;
  static constexpr int kSubBlocks = 32 / kFormat.sub_block;  // of a block of 32 k
  static_assert(kSuper || kSubBlocks == 1);
  // What a quant's float has too much, by which it is made (TileWeights).
  static constexpr float kBase = kFormat.bits == ops::QuantBits::u8 ? 0x1p15f : 0x1p7f;
  // Whether a scale times kBase + zero is a float: not where a scale of 19 bits meets 9 more.
  static constexpr bool kFused = !(kSuper && kFormat.bits == ops::QuantBits::u8);

  static constexpr int kLoaded = tile_load_blocks(kFormat.bits);

  struct Numbers {
    uint64_t halves[kSuper ? 1 : kLoaded];
    uint32_t bytes[kSuper ? kLoaded : 1];
  };
  Numbers scales;
  Numbers minima;

  // `header` are the f16 of these rows in the group's header, `header_row` the bytes of one of its
  // rows.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const uint8_t* superblock, const uint8_t* header,
                            uint32_t header_row, int first, int t, int quad) {
    load(unit, superblock + ops::quant_bytes(kFormat.bits), header, first, t, quad, scales);
    if constexpr (kFormat.has_min) {
      load(unit, superblock + ops::min_offset(kFormat), header + header_row, first, t, quad,
           minima);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE TileAffine affine(Unit& unit, int b, int pair) const {
    TileAffine out;
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * pair + i;
      float minimum = 0.0f;
      if constexpr (kSuper) {
        out.scale[i] = times_byte(unit, half_of(unit, scales.halves[0], row),
                                  scales.bytes[b] ^ 0x80808080u, row, 128.0f);
        if constexpr (kFormat.has_min) {
          minimum =
              times_byte(unit, -half_of(unit, minima.halves[0], row), minima.bytes[b], row, 0.0f);
        }
      } else {
        out.scale[i] = half_of(unit, scales.halves[b], row);
        if constexpr (kFormat.has_min) minimum = half_of(unit, minima.halves[b], row);
      }
      constexpr float kZero = kBase + static_cast<float>(kFormat.zero);
      out.offset[i] = kFused ? fmaf(-out.scale[i], kZero, minimum) : 0.0f;
    }
    return out;
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void load(Unit& unit, const uint8_t* blocks, const uint8_t* header,
                                   int first, int t, int quad, Numbers& out) {
    EFFINFER_UNROLL
    for (int b = 0; b < kLoaded; ++b) {
      if constexpr (kSuper) {
        const int block = kSubBlocks * (first + b) + (kSubBlocks == 2 ? t / 2 : 0);
        out.bytes[b] = unit.load(reinterpret_cast<const uint32_t*>(blocks + block * 16 + quad * 4));
      } else {
        out.halves[b] =
            unit.load(reinterpret_cast<const uint64_t*>(blocks + (first + b) * 32 + quad * 8));
      }
    }
    if constexpr (kSuper) out.halves[0] = unit.load(reinterpret_cast<const uint64_t*>(header));
  }
};

}  // namespace effinfer::cuda
