// Scales and minima of packed weights (ops/packed_weight.h) of the four rows of a lane.
#pragma once

#include <cmath>

#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// `scale` times byte `index` of a dword less `zero`, exactly, for a scale of 11 significant bits:
// the byte with 0x47 is 2^15 + byte, and what the fused multiply-add takes away has 20 bits.
template <class Unit>
EFFINFER_DEVICE float times_byte(Unit& unit, float scale, uint32_t bytes, int index, float zero) {
  const uint32_t pattern =
      unit.permute(bytes, 0x47000000u, 0x7404u | static_cast<uint32_t>(index) << 4);
  return fmaf(scale, float_of(pattern), -scale * (0x1p15f + zero));
}

template <class Unit>
EFFINFER_DEVICE float half_of(Unit& unit, uint64_t four, int index) {
  return unit.from_f16(static_cast<uint16_t>(four >> 16 * index));
}

// Of one superblock, in registers. Blocks are of kFormat.sub_block k.
template <ops::PackedFormat kFormat>
struct WeightScales {
  static constexpr bool kSuper = kFormat.scales == ops::ScaleKind::super;
  static constexpr int kBlocks = static_cast<int>(ops::kSuperblock / kFormat.sub_block);
  static constexpr int kRegisters = (kFormat.has_min ? 2 : 1) * (kSuper ? kBlocks + 2 : 4);

  // One scale or minimum of each row: f16 of direct formats, bytes of super ones.
  struct Numbers {
    uint64_t halves[kSuper ? 1 : kBlocks];  // of super formats what all blocks share
    uint32_t bytes[kSuper ? kBlocks : 1];
  };
  Numbers scales;
  Numbers minima;

  // Of rows 4 quad .. 4 quad + 3 of a superblock.
  static constexpr const uint8_t* place(const uint8_t* superblock, int quad) {
    return superblock + ops::quant_bytes(kFormat.bits) + quad * (kSuper ? 4 : 8);
  }

  // `header` are the f16 of the same rows in the group's header, `header_row` the bytes of one of
  // its rows.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const uint8_t* place, const uint8_t* header,
                            int64_t header_row) {
    load(unit, place, header, scales);
    if constexpr (kFormat.has_min) {
      constexpr int64_t kMinima = ops::min_offset(kFormat) - ops::quant_bytes(kFormat.bits);
      load(unit, place + kMinima, header + header_row, minima);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE float scale(Unit& unit, int block, int row) const {
    if constexpr (kSuper) {
      return times_byte(unit, half_of(unit, scales.halves[0], row),
                        scales.bytes[block] ^ 0x80808080u, row, 128.0f);
    } else {
      return half_of(unit, scales.halves[block], row);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE float minimum(Unit& unit, int block, int row) const {
    if constexpr (kSuper) {
      return times_byte(unit, -half_of(unit, minima.halves[0], row), minima.bytes[block], row,
                        0.0f);
    } else {
      return half_of(unit, minima.halves[block], row);
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void load(Unit& unit, const uint8_t* place, const uint8_t* header,
                                   Numbers& out) {
    EFFINFER_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if constexpr (kSuper) {
        out.bytes[block] = unit.load_once(reinterpret_cast<const uint32_t*>(place + block * 16));
      } else {
        out.halves[block] = unit.load_once(reinterpret_cast<const uint64_t*>(place + block * 32));
      }
    }
    if constexpr (kSuper) out.halves[0] = unit.load(reinterpret_cast<const uint64_t*>(header));
  }
};

}  // namespace effinfer::cuda
