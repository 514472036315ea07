// Packed weights (ops/packed_weight.h) as A fragments of mma.m16n8k16, as they lie.
//
// A warp multiplies 32 rows: two groups. Lane (g, t) = (lane / 4, lane % 4) reads, of the lines of
// its t, the 16 bytes of rows 4 (g % 4) .. 4 (g % 4) + 3 of group g / 4: four rows times four
// consecutive k. The rows and the k of a product may be named in any order, so these bytes are the
// lane's share of fragments already, with no exchange between lanes:
//
//   step s = 0..3     16 k of a superblock: registers 0 and 1 hold k = 16 s + 4 t + {0, 1},
//                     registers 2 and 3 hold k = 16 s + 4 t + {2, 3}
//   pair p = 0, 1     two of the lane's four rows: fragment row g is its row 2 p (registers 0, 2),
//                     fragment row g + 8 its row 2 p + 1 (registers 1, 3)
//
// and the B fragment of a token is the 8 bytes of its bfloat16 x[16 s + 4 t .. + 3].
//
// Field line n of a superblock holds k = 4 n .. 4 n + 3, so step s of lane t is field line 4 s + t.
#pragma once

#include <bit>

#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// Bytes between a lane's lines: those of four t lie side by side.
inline constexpr int kLineStep = 256;

constexpr uint32_t bf16_pair(int value) {
  return (std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16) * 0x10001u;
}

// Bytes 0, 1 (or 2, 3) of a dword, below 128, as two bfloat16 of 128 + byte: 0x4300 is 128, whose
// last bit is worth 1.
template <bool kHigh, class Unit>
EFFINFER_DEVICE uint32_t spread(Unit& unit, uint32_t bytes) {
  return unit.permute(bytes, 0x43434343u, kHigh ? 0x4342u : 0x4140u);
}

// Quants of a superblock in registers. load() takes the lane's rows of its first line and of the
// first one of high bits; bytes(step, row) are the four quants of a row of the lane in
// one step.
template <ops::QuantBits kBits>
struct Quants;

template <>
struct Quants<ops::QuantBits::u4> {
  Quad low[2];

  EFFINFER_DEVICE void load(const uint8_t* first, const uint8_t*) {
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) low[i] = *reinterpret_cast<const Quad*>(first + i * kLineStep);
  }
  template <class Unit>
  EFFINFER_DEVICE uint32_t bytes(Unit&, int step, int row, int) const {
    return low[step % 2].words[row] >> step / 2 * 4 & 0x0f0f0f0fu;
  }
};

// High line f holds bit 4 of field lines 8 f .. 8 f + 7: at bit t of a byte for an even step, at
// bit 4 + t for an odd one.
template <>
struct Quants<ops::QuantBits::u5> {
  Quants<ops::QuantBits::u4> low;
  Quad high[2];

  EFFINFER_DEVICE void load(const uint8_t* first, const uint8_t* first_high) {
    low.load(first, nullptr);
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      high[i] = *reinterpret_cast<const Quad*>(first_high + i * 64);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE uint32_t bytes(Unit& unit, int step, int row, int t) const {
    const uint32_t word = high[step / 2].words[row];
    const uint32_t moved = step % 2 == 0 ? word << (4 - t) : word >> t;
    return low.bytes(unit, step, row, t) | (moved & 0x10101010u);
  }
};

// High line s holds bits 4 and 5 of step s: at bits 2 t, 2 t + 1 of a byte.
template <>
struct Quants<ops::QuantBits::u6> {
  Quants<ops::QuantBits::u4> low;
  Quad high[4];

  EFFINFER_DEVICE void load(const uint8_t* first, const uint8_t* first_high) {
    low.load(first, nullptr);
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      high[i] = *reinterpret_cast<const Quad*>(first_high + i * 64);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE uint32_t bytes(Unit& unit, int step, int row, int t) const {
    return low.bytes(unit, step, row, t) |
           (unit.rotate(high[step].words[row], 4 - 2 * t) & 0x30303030u);
  }
};

template <>
struct Quants<ops::QuantBits::u8> {
  Quad lines[4];

  EFFINFER_DEVICE void load(const uint8_t* first, const uint8_t*) {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) lines[i] = *reinterpret_cast<const Quad*>(first + i * kLineStep);
  }
};

// What fragments of quants hold beyond q - zero: 128 + q are the bytes as they are spread, and the
// tensor cores take the rest away as a product with the sum of the activations, which a row of ones
// makes for all rows. So sums have roundings relative to weights of 128 scales more, 2^-24 of which
// is still nothing next to the rounding of activations to bfloat16.
constexpr int quant_offset(const ops::PackedFormat& format) {
  return format.bits == ops::QuantBits::u8 ? 0 : 128 + format.zero;
}

// A lane's weights of a superblock, or half of a dense one, as they lie in memory. fragment<kPart>(
// unit, step, pair, t, a) gives q - zero + quant_offset() exactly, or for dense weights the numbers
// themselves as the sum of kParts fragments.
template <ops::PackedFormat kFormat>
struct WeightFragments {
  static constexpr int kParts = 1;
  Quants<kFormat.bits> quants;

  // Where the lane's fourth of the rows lies in a group: in its first line, and of high bits.
  EFFINFER_DEVICE static int lines_at(int t, int quad) { return t * 64 + quad * 16; }
  EFFINFER_DEVICE static int high_at(int quad) { return 16 * 64 * 4 / 8 + quad * 16; }

  EFFINFER_DEVICE void load(const uint8_t* lines, const uint8_t* high) { quants.load(lines, high); }

  // Integers up to 256 are exact in bfloat16.
  template <int kPart, class Unit>
  EFFINFER_DEVICE void fragment(Unit& unit, int step, int pair, int t, uint32_t (&a)[4]) const {
    if constexpr (kFormat.bits == ops::QuantBits::u8) {
      // Bytes of 8 bits as q - 128: (128 + q % 128) less 128 where q has its highest bit, else 256.
      // In bfloat16 these two differ by that bit of the exponent: 0x4300 and 0x4380.
      static_assert(kFormat.zero == 128);
      constexpr uint32_t kMinusOne = bf16_pair(-1);
      EFFINFER_UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint32_t bytes = quants.lines[step].words[2 * pair + i];
        const uint32_t low = bytes & 0x7f7f7f7fu;
        const uint32_t less = ~bytes & 0x80808080u;
        a[i] = unit.fma_bf16x2(spread<false>(unit, less), kMinusOne, spread<false>(unit, low));
        a[2 + i] = unit.fma_bf16x2(spread<true>(unit, less), kMinusOne, spread<true>(unit, low));
      }
    } else {
      EFFINFER_UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint32_t bytes = quants.bytes(unit, step, 2 * pair + i, t);
        a[i] = spread<false>(unit, bytes);
        a[2 + i] = spread<true>(unit, bytes);
      }
    }
  }
};

inline constexpr ops::PackedFormat kDenseBf16 = {ops::QuantBits::bf16, ops::ScaleKind::dense, false,
                                                 0, 0};
inline constexpr ops::PackedFormat kDenseF16 = {ops::QuantBits::f16, ops::ScaleKind::dense, false,
                                                0, 0};

// A line holds two k of 16 rows: two lines a step and lane, of two steps.
template <>
struct WeightFragments<kDenseBf16> {
  static constexpr int kParts = 1;
  Quad lines[2][2];

  EFFINFER_DEVICE static int lines_at(int t, int quad) { return t * 128 + quad * 16; }
  EFFINFER_DEVICE static int high_at(int) { return 0; }

  EFFINFER_DEVICE void load(const uint8_t* first, const uint8_t*) {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint8_t* line = first + i / 2 * 512 + i % 2 * 64;
      lines[i / 2][i % 2] = *reinterpret_cast<const Quad*>(line);
    }
  }
  template <int kPart, class Unit>
  EFFINFER_DEVICE void fragment(Unit&, int step, int pair, int, uint32_t (&a)[4]) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = lines[step][i / 2].words[2 * pair + i % 2];
  }
};

// Half a line is one k of 16 rows: four reads of 8 bytes a step and lane. A float16 has 11
// significant bits and a bfloat16 8, so each weight is the exact sum of two bfloat16: its upper
// bits and the rest. (An infinity would become NaN.)
template <>
struct WeightFragments<kDenseF16> {
  static constexpr int kParts = 2;
  uint64_t rows[2][4];

  EFFINFER_DEVICE static int lines_at(int t, int quad) { return t * 128 + quad * 8; }
  EFFINFER_DEVICE static int high_at(int) { return 0; }

  EFFINFER_DEVICE void load(const uint8_t* first, const uint8_t*) {
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint8_t* row = first + i / 4 * 512 + i % 4 * 32;
      rows[i / 4][i % 4] = *reinterpret_cast<const uint64_t*>(row);
    }
  }
  template <int kPart, class Unit>
  EFFINFER_DEVICE void fragment(Unit& unit, int step, int pair, int, uint32_t (&a)[4]) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t numbers[2];
      EFFINFER_UNROLL
      for (int j = 0; j < 2; ++j) {
        const uint64_t four = rows[step][i / 2 * 2 + j];
        const float value = unit.from_f16(static_cast<uint16_t>(four >> 16 * (2 * pair + i % 2)));
        const uint32_t upper = bits_of(value) & 0xffff0000u;
        numbers[j] = kPart == 0 ? upper : bits_of(value - float_of(upper));
      }
      a[i] = unit.permute(numbers[0], numbers[1], 0x7632u);
    }
  }
};

}  // namespace effinfer::cuda
