// Scales and minima of packed weights (ops/packed_weight.h) of the four rows of a lane.
#pragma once

#include <cmath>

#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// 2^15 + byte `index` of a dword: the byte with 0x47.
template <class Unit>
EFFINFER_DEVICE float with_byte(Unit& unit, uint32_t bytes, int index) {
  return float_of(unit.permute(bytes, 0x47000000u, 0x7404u | static_cast<uint32_t>(index) << 4));
}

// `scale` times byte `index` of a dword less `zero`, exactly, for a scale of 11 significant bits:
// what the fused multiply-add takes away has 20 bits.
template <class Unit>
EFFINFER_DEVICE float times_byte(Unit& unit, float scale, uint32_t bytes, int index, float zero) {
  return fmaf(scale, with_byte(unit, bytes, index), -scale * (0x1p15f + zero));
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

  // One scale or minimum of each row: f16 of direct formats, bytes of super ones.
  struct Numbers {
    uint64_t halves[kSuper ? 1 : kBlocks];  // of super formats what all blocks share
    uint32_t bytes[kSuper ? kBlocks : 1];
  };
  Numbers scales;
  Numbers minima;

  static constexpr int kRowBytes = kSuper ? 4 : 8;  // of four rows in one block

  // `first` are the lane's rows of the first block, `header` the f16 of the same rows: both in
  // shared memory, where a row of the header is 32 bytes.
  EFFINFER_DEVICE void load(const uint8_t* first, const uint8_t* header) {
    load(first, header, scales);
    if constexpr (kFormat.has_min) {
      constexpr int64_t kMinima = ops::min_offset(kFormat) - ops::quant_bytes(kFormat.bits);
      load(first + kMinima, header + ops::kGroupRows * 2, minima);
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
  EFFINFER_DEVICE static void load(const uint8_t* first, const uint8_t* header, Numbers& out) {
    EFFINFER_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if constexpr (kSuper) {
        out.bytes[block] = *reinterpret_cast<const uint32_t*>(first + block * 16);
      } else {
        out.halves[block] = *reinterpret_cast<const uint64_t*>(first + block * 32);
      }
    }
    if constexpr (kSuper) out.halves[0] = *reinterpret_cast<const uint64_t*>(header);
  }
};

}  // namespace effinfer::cuda
