// Ternary blocks between digits and the packed lines of ops/packed_weight.h. A panel is a block
// as bytes: line n holds the digits of dword n, 16 rows x 4 k.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/float16.h"
#include "ops/operand.h"
#include "ops/packed_weight.h"

namespace effinfer::cpu {

// With more columns sums of products would need more than 32 bits (vectors/matmul_ternary.h).
inline constexpr int64_t kMaxTernaryCols = int64_t{1} << 18;
// Tokens of a pass over a unit: 48 KB of sums.
inline constexpr int kTernaryTokens = 128;

inline constexpr int kPanelDwords = static_cast<int>(ops::kTernaryBlock / 4);
inline constexpr int kPanelBytes = kPanelDwords * 64;  // of one group

// The blocks of k of a ternary group, as a matmul goes through them.
struct TernaryBlocks {
  int64_t dwords;  // of all

  [[gnu::always_inline]] explicit TernaryBlocks(int64_t cols)
      : dwords(ops::padded_cols(cols) / 4) {}
  [[gnu::always_inline]] int64_t count() const {
    return (dwords + kPanelDwords - 1) / kPanelDwords;
  }
  [[gnu::always_inline]] int dwords_of(int64_t block) const {
    const int64_t left = dwords - block * kPanelDwords;
    return left < kPanelDwords ? static_cast<int>(left) : kPanelDwords;
  }
};

[[gnu::always_inline]] inline constexpr int64_t ternary_block_bytes(ops::QuantBits bits) {
  return ops::ternary_lines(bits, kPanelDwords) * 64;
}

// Digits `digits[f]` of one byte, 0..2 each.
template <ops::QuantBits bits>
[[gnu::always_inline]] inline uint8_t encode_digits(const uint8_t* digits) {
  if constexpr (bits == ops::QuantBits::t2) {
    return static_cast<uint8_t>(digits[0] | digits[1] << 2 | digits[2] << 4 | digits[3] << 6);
  } else {
    int value = 0;
    for (int f = 0; f < 5; ++f) value = value * 3 + digits[f];
    return static_cast<uint8_t>((value * 256 + 242) / 243);
  }
}

template <ops::QuantBits bits>
[[gnu::always_inline]] inline void decode_digits(uint8_t byte, uint8_t* digits) {
  if constexpr (bits == ops::QuantBits::t2) {
    for (int f = 0; f < 4; ++f) digits[f] = byte >> 2 * f & 3;
  } else {
    for (int f = 0; f < 5; ++f) {
      const int product = 3 * byte;
      digits[f] = static_cast<uint8_t>(product >> 8);
      byte = static_cast<uint8_t>(product);
    }
  }
}

template <ops::QuantBits bits>
inline constexpr int kDigitsPerByte = bits == ops::QuantBits::t2 ? 4 : 5;

// A panel of `dwords` lines to packed lines.
template <ops::QuantBits bits>
void pack_panel(const uint8_t* panel, int dwords, uint8_t* out) {
  const int lines = static_cast<int>(ops::ternary_lines(bits, dwords));
  for (int i = 0; i < lines; ++i) {
    for (int byte = 0; byte < 64; ++byte) {
      uint8_t digits[kDigitsPerByte<bits>] = {};
      for (int f = 0; f < kDigitsPerByte<bits>; ++f) {
        if (f * lines + i < dwords) digits[f] = panel[(f * lines + i) * 64 + byte];
      }
      out[i * 64 + byte] = encode_digits<bits>(digits);
    }
  }
}

template <ops::QuantBits bits>
void unpack_panel(const uint8_t* packed, int dwords, uint8_t* panel) {
  const int lines = static_cast<int>(ops::ternary_lines(bits, dwords));
  for (int i = 0; i < lines; ++i) {
    for (int byte = 0; byte < 64; ++byte) {
      uint8_t digits[kDigitsPerByte<bits>];
      decode_digits<bits>(packed[i * 64 + byte], digits);
      for (int f = 0; f < kDigitsPerByte<bits>; ++f) {
        if (f * lines + i < dwords) panel[(f * lines + i) * 64 + byte] = digits[f];
      }
    }
  }
}

// Calls body(std::integral_constant<QuantBits, bits>()) for a ternary format's bits.
template <class Body>
[[gnu::always_inline]] inline void with_ternary_bits(ops::QuantBits bits, Body&& body) {
  using ops::QuantBits;
  if (bits == QuantBits::t2) return body(std::integral_constant<QuantBits, QuantBits::t2>());
  return body(std::integral_constant<QuantBits, QuantBits::t1_6>());
}

// Flattened: what it calls is inlined, so that no level's object defines it.
[[gnu::noinline, gnu::flatten, maybe_unused]] static int64_t row_stride(const ops::Operand& x) {
  return x.row_bytes();
}

// Rows of an int8_token operand, as ops::token_row() gives them, of nothing but what is inlined.
struct TokenRows {
  const uint8_t* data;
  int64_t stride;
  int64_t padded;

  [[gnu::always_inline]] explicit TokenRows(const ops::Operand& x)
      : data(static_cast<const uint8_t*>(x.data)),
        stride(row_stride(x)),
        padded((x.cols + ops::kOperandPad - 1) / ops::kOperandPad * ops::kOperandPad) {}
  [[gnu::always_inline]] ops::TokenRow operator[](int64_t index) const {
    const uint8_t* row = data + index * stride;
    return {reinterpret_cast<const int8_t*>(row), *reinterpret_cast<const float*>(row + padded),
            *reinterpret_cast<const int32_t*>(row + padded + 4),
            reinterpret_cast<const int32_t*>(row + padded + 8)};
  }
};

// The header of a group: scales of rows, and whether they hold for all blocks.
[[gnu::always_inline]] inline const float* row_scales(const uint8_t* group) {
  return reinterpret_cast<const float*>(group);
}
[[gnu::always_inline]] inline bool is_uniform(const ops::PackedFormat& format,
                                              const uint8_t* group) {
  int32_t flag;
  std::memcpy(&flag, group + 64, sizeof(flag));
  return format.scales == ops::ScaleKind::row || flag != 0;
}
// Scales of the 16 rows in block `block` of a group with ScaleKind::group.
[[gnu::always_inline]] inline void load_block_scales(const ops::PackedWeight& weight,
                                                     const uint8_t* group, int64_t block,
                                                     float* out) {
  uint16_t halves[ops::kGroupRows];
  std::memcpy(halves,
              group + ops::header_bytes(weight.format, weight.cols) +
                  ops::ternary_quant_bytes(weight.format.bits, weight.cols) +
                  block * ops::kGroupRows * 2,
              sizeof(halves));
  for (int64_t r = 0; r < ops::kGroupRows; ++r) out[r] = f16_to_f32(halves[r]);
}

}  // namespace effinfer::cpu
