// Numbers of packed weights (ops/packed_weight.h), with the bits of ops::unpack_row(): every format
// but the ternary ones t2 and t1_6. Row r of a group is dword r of each of its lines of 64 bytes:
//
//   4 bits and more   dword n of a row's 16 in a superblock of 64 k holds the low 4 bits (u8: all)
//                     of k = 4n .. 4n+3, one to a byte: line n % 8, shifted right by 4 (n / 8)
//                     (u8: line n)
//   u5                bit n % 8 of each byte of line 8 + n / 8 is the fifth bit
//   u6                bits 2 (n % 4) .. of each byte of line 8 + n / 4 are the fifth and sixth
#pragma once

#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

inline constexpr int kDwordNumbers = 4;  // k under one dword

template <class T, class Unit>
EFFINFER_DEVICE T packed_load(Unit& unit, const uint8_t* data, int64_t index) {
  return unit.load(reinterpret_cast<const T*>(data) + index);
}
template <class Unit>
EFFINFER_DEVICE float packed_half(Unit& unit, const uint8_t* data, int64_t index) {
  return unit.from_f16(packed_load<uint16_t>(unit, data, index));
}

// The quants of dword `n` of row `r` of a superblock, one to a byte.
template <class Unit>
EFFINFER_DEVICE uint32_t packed_quants(Unit& unit, ops::QuantBits bits, const uint8_t* superblock,
                                       int r, int n) {
  const auto dword = [&](int line) {
    return packed_load<uint32_t>(unit, superblock, line * ops::kGroupRows + r);
  };
  if (bits == ops::QuantBits::u8) return dword(n);
  uint32_t quants = dword(n % 8) >> 4 * (n / 8) & 0x0f0f0f0fu;
  if (bits == ops::QuantBits::u5) {
    quants |= (dword(8 + n / 8) >> n % 8 & 0x01010101u) << 4;
  } else if (bits == ops::QuantBits::u6) {
    quants |= (dword(8 + n / 4) >> 2 * (n % 4) & 0x03030303u) << 4;
  }
  return quants;
}

// A weight whose data is the device's, and what its format says of where things lie.
struct PackedTable {
  ops::PackedWeight weight;
  int64_t header = 0;           // bytes of a group's header
  int64_t header_minima = 0;    // where its minima begin
  int64_t superblock_step = 0;  // between superblocks
  int64_t scales = 0;           // in a superblock
  int64_t minima = 0;

  // Of the host.
  static PackedTable of(const ops::PackedWeight& weight) {
    const ops::PackedFormat& format = weight.format;
    if (format.scales == ops::ScaleKind::dense) return {weight};
    return {weight,
            ops::header_bytes(format, weight.cols),
            ops::header_row_bytes(weight.cols),
            ops::superblock_bytes(format),
            ops::quant_bytes(format.bits),
            ops::min_offset(format)};
  }
};

struct PackedScale {
  float scale;
  float min;
};

// Of the values that lie under one scale with value `k` of row `r` of a group.
template <class Unit>
EFFINFER_DEVICE PackedScale packed_scale(Unit& unit, const PackedTable& table, const uint8_t* group,
                                         const uint8_t* superblock, int r, int64_t k) {
  const ops::PackedFormat& format = table.weight.format;
  const uint8_t* scales = superblock + table.scales;
  const uint8_t* minima = superblock + table.minima;
  const int64_t index = k % ops::kSuperblock / format.sub_block * ops::kGroupRows + r;
  PackedScale out{0.0f, 0.0f};
  if (format.scales == ops::ScaleKind::direct) {
    out.scale = packed_half(unit, scales, index);
    if (format.has_min) out.min = packed_half(unit, minima, index);
    return out;
  }
  const int64_t header = k / ops::kHeaderBlock * ops::kGroupRows + r;
  const float s = static_cast<float>(packed_load<int8_t>(unit, scales, index));
  out.scale = packed_half(unit, group, header) * s;
  if (format.has_min) {
    const float m = static_cast<float>(packed_load<uint8_t>(unit, minima, index));
    out.min = -(packed_half(unit, group + table.header_minima, header) * m);
  }
  return out;
}

template <class Unit>
EFFINFER_DEVICE float packed_dense(Unit& unit, ops::QuantBits bits, const uint8_t* group, int r,
                                   int64_t k) {
  switch (bits) {
    case ops::QuantBits::f32:
      return packed_load<float>(unit, group, k * ops::kGroupRows + r);
    case ops::QuantBits::f16:
      return packed_half(unit, group, k * ops::kGroupRows + r);
    default: {
      const int64_t index = (k / 2 * ops::kGroupRows + r) * 2 + k % 2;
      return float_of(uint32_t{packed_load<uint16_t>(unit, group, index)} << 16);
    }
  }
}

// Values k .. k+3 of a row, k a multiple of 4 below the weight's columns; what lies behind these is
// zeros. Adding the minimum may be contracted into a fused multiply-add: formats that have one
// have quants of 5 bits at most and scales of 19, so that the product is exact.
template <class Unit>
EFFINFER_DEVICE void packed_values(Unit& unit, const PackedTable& table, int64_t row, int64_t k,
                                   float (&out)[kDwordNumbers]) {
  const ops::PackedFormat& format = table.weight.format;
  const uint8_t* group = table.weight.data + row / ops::kGroupRows * table.weight.group_bytes;
  const int r = static_cast<int>(row % ops::kGroupRows);
  if (format.scales == ops::ScaleKind::dense) {
    EFFINFER_UNROLL
    for (int e = 0; e < kDwordNumbers; ++e) {
      out[e] = packed_dense(unit, format.bits, group, r, k + e);
    }
    return;
  }
  const uint8_t* superblock = group + table.header + k / ops::kSuperblock * table.superblock_step;
  const int n = static_cast<int>(k % ops::kSuperblock / kDwordNumbers);
  const uint32_t quants = packed_quants(unit, format.bits, superblock, r, n);
  const PackedScale scale = packed_scale(unit, table, group, superblock, r, k);
  EFFINFER_UNROLL
  for (int e = 0; e < kDwordNumbers; ++e) {
    const int q = static_cast<int>(quants >> 8 * e & 0xffu) - format.zero;
    out[e] = scale.scale * static_cast<float>(q);
    if (format.has_min) out[e] += scale.min;
  }
}

template <class Unit>
EFFINFER_DEVICE float packed_value(Unit& unit, const PackedTable& table, int64_t row, int64_t k) {
  float values[kDwordNumbers];
  packed_values(unit, table, row, k / kDwordNumbers * kDwordNumbers, values);
  const int e = static_cast<int>(k % kDwordNumbers);
  return e < 2 ? (e == 0 ? values[0] : values[1]) : (e == 2 ? values[2] : values[3]);
}

}  // namespace effinfer::cuda
