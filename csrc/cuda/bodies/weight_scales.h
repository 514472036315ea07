// Scales and minima of packed weights (ops/packed_weight.h) of the four rows of a lane.
#pragma once

#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// Byte `index` of a dword, as it is or less 128: 0x4b000000 is 2^23 as a float, whose last bit is
// worth 1.
template <class Unit>
EFFINFER_DEVICE float float_of_byte(Unit& unit, uint32_t bytes, int index, float less) {
  const uint32_t pattern = unit.permute(bytes, 0x4b000000u, 0x7440u | static_cast<uint32_t>(index));
  return float_of(pattern) - (0x1p23f + less);
}

template <class Unit>
EFFINFER_DEVICE float half_of(Unit& unit, uint64_t four, int index) {
  return unit.from_f16(static_cast<uint16_t>(four >> 16 * index));
}

// Where a row group lies, from rows 4 quad .. 4 quad + 3 on.
struct GroupPlace {
  const uint8_t* header;       // of super formats: f16 d of the lane's rows in the first 256 k
  const uint8_t* superblocks;  // the first one
};

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

  // `header_row` are the bytes of a row of the group's header.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const GroupPlace& group, int superblock, int quad,
                            int64_t header_row) {
    const uint8_t* data = group.superblocks + superblock * ops::superblock_bytes(kFormat);
    constexpr int kHeaderStep = static_cast<int>(ops::kHeaderBlock / ops::kSuperblock);
    const uint8_t* header = group.header + superblock / kHeaderStep * (ops::kGroupRows * 2);
    load(unit, data + ops::quant_bytes(kFormat.bits), header, quad, scales);
    if constexpr (kFormat.has_min) {
      load(unit, data + ops::min_offset(kFormat), header + header_row, quad, minima);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE float scale(Unit& unit, int block, int row) const {
    if constexpr (kSuper) {
      const uint32_t biased = scales.bytes[block] ^ 0x80808080u;
      return half_of(unit, scales.halves[0], row) * float_of_byte(unit, biased, row, 128.0f);
    } else {
      return half_of(unit, scales.halves[block], row);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE float minimum(Unit& unit, int block, int row) const {
    if constexpr (kSuper) {
      return -(half_of(unit, minima.halves[0], row) *
               float_of_byte(unit, minima.bytes[block], row, 0.0f));
    } else {
      return half_of(unit, minima.halves[block], row);
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void load(Unit& unit, const uint8_t* data, const uint8_t* header, int quad,
                                   Numbers& out) {
    EFFINFER_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if constexpr (kSuper) {
        out.bytes[block] =
            unit.load_once(reinterpret_cast<const uint32_t*>(data + block * 16 + quad * 4));
      } else {
        out.halves[block] =
            unit.load_once(reinterpret_cast<const uint64_t*>(data + block * 32 + quad * 8));
      }
    }
    if constexpr (kSuper) out.halves[0] = unit.load(reinterpret_cast<const uint64_t*>(header));
  }
};

}  // namespace effinfer::cuda
