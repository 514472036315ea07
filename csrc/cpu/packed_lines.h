// The quants of one superblock of a group, between the packed lines of ops/packed_weight.h and
// whole bytes. Field line n of the byte form holds k = 4n + j of row r at byte 4r + j.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/float16.h"
#include "ops/packed_weight.h"

namespace effinfer::cpu {

inline constexpr int kFieldLines = 16;  // of 64 bytes: one superblock of a group as bytes

// Packs rows of 64 quants, which lie `stride` bytes apart.
template <ops::QuantBits bits>
void pack_lines(const uint8_t* rows, int64_t stride, uint8_t* out) {
  using ops::QuantBits;
  constexpr int kRows = static_cast<int>(ops::kGroupRows);
  uint32_t lines[16 * kRows] = {};
  for (int r = 0; r < kRows; ++r) {
    uint32_t field[kFieldLines];  // the row's dwords, 4 values of k each
    std::memcpy(field, rows + r * stride, sizeof(field));
    if constexpr (bits == QuantBits::u8) {
      for (int n = 0; n < 16; ++n) lines[n * kRows + r] = field[n];
    } else {
      for (int i = 0; i < 8; ++i) {
        lines[i * kRows + r] = (field[i] & 0x0f0f0f0fu) | (field[8 + i] & 0x0f0f0f0fu) << 4;
      }
      if constexpr (bits == QuantBits::u5) {
        for (int n = 0; n < 16; ++n) {
          lines[(8 + n / 8) * kRows + r] |= (field[n] >> 4 & 0x01010101u) << n % 8;
        }
      } else if constexpr (bits == QuantBits::u6) {
        for (int n = 0; n < 16; ++n) {
          lines[(8 + n / 4) * kRows + r] |= (field[n] >> 4 & 0x03030303u) << 2 * (n % 4);
        }
      }
    }
  }
  std::memcpy(out, lines, static_cast<size_t>(ops::quant_bytes(bits)));
}

// Unpacks a superblock to 16 field lines of 64 bytes.
template <ops::QuantBits bits>
[[gnu::always_inline]] inline void unpack_lines(const uint8_t* packed, uint8_t* out) {
  using ops::QuantBits;
  if constexpr (bits == QuantBits::u8) {
    std::memcpy(out, packed, 1024);
  } else {
    for (int n = 0; n < kFieldLines; ++n) {
      for (int byte = 0; byte < 64; ++byte) {
        int q = packed[n % 8 * 64 + byte] >> 4 * (n / 8) & 15;
        if constexpr (bits == QuantBits::u5) {
          q |= (packed[(8 + n / 8) * 64 + byte] >> n % 8 & 1) << 4;
        } else if constexpr (bits == QuantBits::u6) {
          q |= (packed[(8 + n / 4) * 64 + byte] >> 2 * (n % 4) & 3) << 4;
        }
        out[n * 64 + byte] = static_cast<uint8_t>(q);
      }
    }
  }
}

// The 64 quants of row `row` of a superblock, in order of k.
template <ops::QuantBits bits>
[[gnu::always_inline]] inline void unpack_row_quants(const uint8_t* packed, int64_t row,
                                                     uint8_t* out) {
  using ops::QuantBits;
  const auto dword = [&](int line) {
    uint32_t value;
    std::memcpy(&value, packed + line * 64 + row * 4, sizeof(value));
    return value;
  };
  uint32_t field[kFieldLines];
  for (int n = 0; n < kFieldLines; ++n) {
    if constexpr (bits == QuantBits::u8) {
      field[n] = dword(n);
    } else {
      field[n] = dword(n % 8) >> 4 * (n / 8) & 0x0f0f0f0fu;
      if constexpr (bits == QuantBits::u5) {
        field[n] |= (dword(8 + n / 8) >> n % 8 & 0x01010101u) << 4;
      } else if constexpr (bits == QuantBits::u6) {
        field[n] |= (dword(8 + n / 4) >> 2 * (n % 4) & 0x03030303u) << 4;
      }
    }
  }
  std::memcpy(out, field, sizeof(field));
}

// Number `index` of an array of f16.
[[gnu::always_inline]] inline float load_half(const uint8_t* data, int64_t index) {
  uint16_t bits;
  std::memcpy(&bits, data + index * 2, sizeof(bits));
  return f16_to_f32(bits);
}

// Scales and minima of the 16 rows in one sub-block: w = scale * (q - zero) + min.
struct Affine {
  float scale[ops::kGroupRows];
  float min[ops::kGroupRows];
};

// Loads what rows [first, last) have; that of the others stays as it is.
[[gnu::always_inline]] inline void load_affine_rows(const ops::PackedFormat& format, int64_t cols,
                                                    const uint8_t* group, int64_t superblock,
                                                    int64_t sub, int64_t first, int64_t last,
                                                    Affine& affine) {
  using ops::kGroupRows;
  const uint8_t* data =
      group + ops::header_bytes(format, cols) + superblock * ops::superblock_bytes(format);
  const uint8_t* scales = data + ops::quant_bytes(format.bits);
  const uint8_t* mins = data + ops::min_offset(format);
  const int64_t header = superblock * ops::kSuperblock / ops::kHeaderBlock * kGroupRows;
  for (int64_t r = first; r < last; ++r) {
    const int64_t index = sub * kGroupRows + r;
    if (format.scales == ops::ScaleKind::direct) {
      affine.scale[r] = load_half(scales, index);
      if (format.has_min) affine.min[r] = load_half(mins, index);
    } else {
      const float d = load_half(group, header + r);
      affine.scale[r] = d * static_cast<float>(static_cast<int8_t>(scales[index]));
      if (format.has_min) {
        const float dmin = load_half(group + ops::header_row_bytes(cols), header + r);
        affine.min[r] = -(dmin * static_cast<float>(mins[index]));
      }
    }
  }
}

// Sub-block `sub` of superblock `superblock` of a group. `format` is the weight's, as a constant
// where the caller has one.
[[gnu::always_inline]] inline Affine load_affine(const ops::PackedFormat& format,
                                                 const ops::PackedWeight& weight,
                                                 const uint8_t* group, int64_t superblock,
                                                 int64_t sub) {
  Affine affine{};
  load_affine_rows(format, weight.cols, group, superblock, sub, 0, ops::kGroupRows, affine);
  return affine;
}

// Calls body(std::integral_constant<QuantBits, bits>()) for a quantised format's bits.
template <class Body>
[[gnu::always_inline]] inline void with_quant_bits(ops::QuantBits bits, Body&& body) {
  using ops::QuantBits;
  switch (bits) {
    case QuantBits::u4:
      return body(std::integral_constant<QuantBits, QuantBits::u4>());
    case QuantBits::u5:
      return body(std::integral_constant<QuantBits, QuantBits::u5>());
    case QuantBits::u6:
      return body(std::integral_constant<QuantBits, QuantBits::u6>());
    default:
      return body(std::integral_constant<QuantBits, QuantBits::u8>());
  }
}

}  // namespace effinfer::cpu
