// Scales and minima of a superblock of the four rows of a lane, for stream_matmul.h.
#pragma once

#include <cmath>

#include "cuda/bodies/dequant.h"
#include "cuda/bodies/weight_scales.h"
#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// What the four superblocks under a row of a super format's header share: its f16, which come from
// global memory a place ahead, and what they are to bytes (times_byte()).
template <ops::PackedFormat kFormat>
struct HeaderRow {
  static constexpr bool kSuper = kFormat.scales == ops::ScaleKind::super;
  static constexpr bool kHasMin = kSuper && kFormat.has_min;

  uint64_t scales;
  uint64_t minima;

  // Of the superblock's row; `header` is the lane's rows of the first one.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const uint8_t* header, int64_t row_bytes, int superblock) {
    if constexpr (kSuper) {
      const uint8_t* row = header + (superblock >> 2) * (ops::kGroupRows * 2);
      scales = unit.load_written(reinterpret_cast<const uint64_t*>(row));
      if constexpr (kHasMin) {
        minima = unit.load_written(reinterpret_cast<const uint64_t*>(row + row_bytes));
      }
    }
  }
};

template <ops::PackedFormat kFormat>
struct HeaderFactors {
  using Row = HeaderRow<kFormat>;

  float scale[Row::kSuper ? 4 : 1] = {};
  float less[Row::kSuper ? 4 : 1] = {};
  float minimum[Row::kHasMin ? 4 : 1] = {};
  float minimum_less[Row::kHasMin ? 4 : 1] = {};

  template <class Unit>
  EFFINFER_DEVICE HeaderFactors(Unit& unit, const Row& header) {
    if constexpr (Row::kSuper) {
      EFFINFER_UNROLL
      for (int row = 0; row < 4; ++row) {
        scale[row] = half_of(unit, header.scales, row);
        less[row] = unit.kept(-scale[row] * (0x1p15f + 128.0f));
        if constexpr (Row::kHasMin) {
          minimum[row] = half_of(unit, header.minima, row) / quant_offset(kFormat);
          minimum_less[row] = unit.kept(-minimum[row] * 0x1p15f);
        }
      }
    }
  }
};

template <ops::PackedFormat kFormat>
struct StreamScales {
  static constexpr bool kSuper = kFormat.scales == ops::ScaleKind::super;
  static constexpr int kBlocks = static_cast<int>(ops::kSuperblock / kFormat.sub_block);

  // Of each block of kFormat.sub_block k: bytes of super formats, f16 of direct ones.
  struct Numbers {
    uint64_t halves[kSuper ? 1 : kBlocks];
    uint32_t bytes[kSuper ? kBlocks : 1];
  };
  Numbers scales;
  Numbers minima;

  // Where those of the lane's fourth of the rows lie in a group.
  EFFINFER_DEVICE static int at(int quad) {
    return static_cast<int>(ops::quant_bytes(kFormat.bits)) + quad * (kSuper ? 4 : 8);
  }

  // From the lane's first one on.
  EFFINFER_DEVICE void load(const uint8_t* first) {
    load(first, scales);
    if constexpr (kFormat.has_min) {
      constexpr int64_t kMinima = ops::min_offset(kFormat) - ops::quant_bytes(kFormat.bits);
      load(first + kMinima, minima);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE float scale(Unit& unit, const HeaderFactors<kFormat>& header, int block,
                              int row) const {
    if constexpr (kSuper) {
      const uint32_t bytes = scales.bytes[block] ^ 0x80808080u;
      return fmaf(header.scale[row], with_byte(unit, bytes, row), header.less[row]);
    } else {
      return half_of(unit, scales.halves[block], row);
    }
  }

  // What a minimum is to activations times -quant_offset(), which is a power of two.
  template <class Unit>
  EFFINFER_DEVICE float minimum(Unit& unit, const HeaderFactors<kFormat>& header, int block,
                                int row) const {
    if constexpr (kSuper) {
      return fmaf(header.minimum[row], with_byte(unit, minima.bytes[block], row),
                  header.minimum_less[row]);
    } else {
      return half_of(unit, minima.halves[block], row) / -quant_offset(kFormat);
    }
  }

 private:
  EFFINFER_DEVICE static void load(const uint8_t* first, Numbers& out) {
    EFFINFER_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if constexpr (kSuper) {
        out.bytes[block] = *reinterpret_cast<const uint32_t*>(first + block * 16);
      } else {
        out.halves[block] = *reinterpret_cast<const uint64_t*>(first + block * 32);
      }
    }
  }
};

}  // namespace effinfer::cuda
