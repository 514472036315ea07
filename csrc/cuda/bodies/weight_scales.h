// Numbers that scales and minima of packed weights (ops/packed_weight.h) are made of.
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

}  // namespace effinfer::cuda
