// Scales and minima of a superblock, for stream_matmul.h: of the four rows that a lane's fragments
// have (dequant.h), or of one row a lane, in their order.
#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/bodies/dequant.h"
#include "cuda/bodies/weight_scales.h"
#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// The first of the lane's rows in the row group of its half of the warp.
template <int kRows>
EFFINFER_DEVICE constexpr int first_row(int lane) {
  static_assert(kRows == 4 || kRows == 1);
  return kRows == 4 ? lane / 4 % 4 * 4 : lane % 16;
}

// What the four superblocks under a row of a super format's header share: its f16, which come from
// global memory a place ahead, and what they are to bytes (times_byte()).
template <ops::PackedFormat kFormat, int kRows>
struct HeaderRow {
  static constexpr bool kSuper = kFormat.scales == ops::ScaleKind::super;
  static constexpr bool kHasMin = kSuper && kFormat.has_min;
  using Halves = std::conditional_t<kRows == 4, uint64_t, uint16_t>;

  Halves scales;
  Halves minima;

  // Where the lane's rows lie in one of a header.
  EFFINFER_DEVICE static int at(int lane) { return first_row<kRows>(lane) * 2; }

  // Of the superblock's row; `header` is the lane's rows of the first one.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const uint8_t* header, int64_t row_bytes, int superblock) {
    if constexpr (kSuper) {
      const uint8_t* row = header + (superblock >> 2) * (ops::kGroupRows * 2);
      scales = unit.load_written(reinterpret_cast<const Halves*>(row));
      if constexpr (kHasMin) {
        minima = unit.load_written(reinterpret_cast<const Halves*>(row + row_bytes));
      }
    }
  }
};

template <ops::PackedFormat kFormat, int kRows>
struct HeaderFactors {
  using Row = HeaderRow<kFormat, kRows>;

  float scale[Row::kSuper ? kRows : 1] = {};
  float less[Row::kSuper ? kRows : 1] = {};
  float minimum[Row::kHasMin ? kRows : 1] = {};
  float minimum_less[Row::kHasMin ? kRows : 1] = {};

  template <class Unit>
  EFFINFER_DEVICE HeaderFactors(Unit& unit, const Row& header) {
    if constexpr (Row::kSuper) {
      EFFINFER_UNROLL
      for (int row = 0; row < kRows; ++row) {
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

template <ops::PackedFormat kFormat, int kRows>
struct StreamScales {
  static constexpr bool kSuper = kFormat.scales == ops::ScaleKind::super;
  static constexpr int kBlocks = static_cast<int>(ops::kSuperblock / kFormat.sub_block);

  // Of each block of kFormat.sub_block k: bytes of super formats, f16 of direct ones.
  using Bytes = std::conditional_t<kRows == 4, uint32_t, uint8_t>;
  using Halves = std::conditional_t<kRows == 4, uint64_t, uint16_t>;
  using Number = std::conditional_t<kSuper, Bytes, Halves>;
  using Numbers = Number[kBlocks];
  Numbers scales;
  Numbers minima;

  // Where those of the lane's rows lie in a group.
  EFFINFER_DEVICE static int at(int lane) {
    return static_cast<int>(ops::quant_bytes(kFormat.bits)) + first_row<kRows>(lane) * kNumber;
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
  EFFINFER_DEVICE float scale(Unit& unit, const HeaderFactors<kFormat, kRows>& header, int block,
                              int row) const {
    if constexpr (kSuper) {
      const Bytes signs = static_cast<Bytes>(0x80808080u);
      return fmaf(header.scale[row], number_of(unit, scales[block] ^ signs, row), header.less[row]);
    } else {
      return half_of(unit, scales[block], row);
    }
  }

  // What a minimum is to activations times -quant_offset(), which is a power of two.
  template <class Unit>
  EFFINFER_DEVICE float minimum(Unit& unit, const HeaderFactors<kFormat, kRows>& header, int block,
                                int row) const {
    if constexpr (kSuper) {
      return fmaf(header.minimum[row], number_of(unit, minima[block], row),
                  header.minimum_less[row]);
    } else {
      return half_of(unit, minima[block], row) / -quant_offset(kFormat);
    }
  }

 private:
  static constexpr int kNumber = kSuper ? 1 : 2;  // bytes

  // 2^15 + that of a row. Of one byte alone no permutation has to be told which.
  template <class Unit>
  EFFINFER_DEVICE static float number_of(Unit& unit, uint32_t bytes, int row) {
    return kRows == 1 ? float_of(bytes * 256 + 0x47000000u) : with_byte(unit, bytes, row);
  }

  EFFINFER_DEVICE static void load(const uint8_t* first, Numbers& out) {
    constexpr int kBlockBytes = ops::kGroupRows * kNumber;
    EFFINFER_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      out[block] = *reinterpret_cast<const Number*>(first + block * kBlockBytes);
    }
  }
};

}  // namespace effinfer::cuda
