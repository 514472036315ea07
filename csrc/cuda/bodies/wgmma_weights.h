// Packed weights (ops/packed_weight.h) in shared memory as A fragments of wgmma in registers:
// bfloat16, scales and minima included, each number made in float32 and rounded once.
//
// A warp has a group of 16 rows of a product m64. The rows of a fragment may be named in any order,
// and lane (g, t) = (lane / 4, lane % 4) has rows 2 g and 2 g + 1, which lie next to each other.
// But not its k: its B operand is rows of activations in shared memory, as the tensor map brings
// them. A fragment of step s = 0..3 wants, of each row,
//
//   k = 16 s + 2 t + {0, 1}      registers 0 and 1
//   k = 16 s + 2 t + {8, 9}      registers 2 and 3
//
// A dword of quants has four k, of which lanes 2 u and 2 u + 1 take two each: both read dwords 4 s
// + u and 4 s + 2 + u of both rows, and no lane needs another one's. Reads are of 8 bytes, and
// those of a warp of 128 to 256 bytes in a row.
//
// Fragments are made a chunk of two steps at a time: 32 k.
#pragma once

#include "cuda/bodies/dequant.h"
#include "cuda/bodies/row_chunks.h"
#include "cuda/bodies/weight_scales.h"
#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

inline constexpr int kChunkSteps = 2;

// Of both steps of a chunk.
using ChunkFragments = uint32_t[kChunkSteps][4];

// A number of each of a lane's rows.
EFFINFER_DEVICE Pair load_rows(const uint8_t* from) {
  return *reinterpret_cast<const Pair*>(from);
}

// What a group has for a superblock, and in the header for 256 k.
template <ops::PackedFormat kFormat>
struct GroupPlace {
  static constexpr int kHeaderRows =
      kFormat.scales != ops::ScaleKind::super ? 0 : (kFormat.has_min ? 2 : 1);
  static constexpr int kHeaderRowBytes = static_cast<int>(ops::kGroupRows) * 2;
  static constexpr int kHeaderBytes = kHeaderRows > 0 ? kHeaderRows * kHeaderRowBytes : 1;
  static constexpr int kWeightBytes = static_cast<int>(ops::superblock_bytes(kFormat));
};

// Quants of a chunk. dword(step, half, row, t) are those of dword 4 step + 2 half + t / 2.
template <ops::QuantBits kBits>
struct ChunkQuants {
  static constexpr bool kHasFive = kBits == ops::QuantBits::u5;
  static constexpr bool kHasSix = kBits == ops::QuantBits::u6;
  static constexpr int kHighLines = kHasFive ? 1 : kHasSix ? 2 : 0;
  Pair low[kChunkSteps][2];
  Pair high[kHighLines + 1];

  // A chunk's are the lower or the upper halves of the same bytes.
  EFFINFER_DEVICE void load(const uint8_t* rows, int t, int chunk) {
    if (chunk == 0) {
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) low[i / 2][i % 2] = load_rows(rows + (2 * i + t / 2) * 64);
    }
    EFFINFER_UNROLL
    for (int i = 0; i < kHighLines; ++i) {
      high[i] = load_rows(rows + (8 + chunk * kHighLines + i) * 64);
    }
  }
  // Bit 4 of field lines 8 h .. 8 h + 7 is in high line h, at bit 0 to 7 of a byte; bits 4 and 5 of
  // 4 h .. 4 h + 3 are at bits 0, 2, 4 and 6.
  EFFINFER_DEVICE uint32_t dword(int chunk, int step, int half, int row, int t) const {
    const uint32_t four = low[step][half].words[row] >> 4 * chunk & 0x0f0f0f0fu;
    if constexpr (kHasFive) {
      const int from = 4 * step + 2 * half;  // and t / 2
      const uint32_t word = high[0].words[row] >> t / 2;
      const uint32_t moved = from <= 4 ? word << (4 - from) : word >> (from - 4);
      return four | (moved & 0x10101010u);
    } else if constexpr (kHasSix) {
      const uint32_t word = high[step].words[row] >> t / 2 * 2;
      return four | ((half == 0 ? word << 4 : word) & 0x30303030u);
    } else {
      return four;
    }
  }
};

template <>
struct ChunkQuants<ops::QuantBits::u8> {
  Pair lines[kChunkSteps][2];

  EFFINFER_DEVICE void load(const uint8_t* rows, int t, int chunk) {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      lines[i / 2][i % 2] = load_rows(rows + (8 * chunk + 2 * i + t / 2) * 64);
    }
  }
  EFFINFER_DEVICE uint32_t dword(int, int step, int half, int row, int) const {
    return lines[step][half].words[row];
  }
};

// Scales and minima of a lane's rows in a chunk.
template <ops::PackedFormat kFormat>
struct ChunkScales {
  static constexpr bool kSuper = kFormat.scales == ops::ScaleKind::super;
  static constexpr int kBlocks = 32 / kFormat.sub_block;

  // Two f16 of direct formats, two bytes of super ones, whose header has two f16.
  struct Numbers {
    uint32_t rows[kBlocks];
    uint32_t header;
  };
  Numbers scales;
  Numbers minima;

  EFFINFER_DEVICE void load(const uint8_t* group, const uint8_t* header, int g, int chunk) {
    load(group + ops::quant_bytes(kFormat.bits), header, g, chunk, scales);
    if constexpr (kFormat.has_min) {
      load(group + ops::min_offset(kFormat), header + GroupPlace<kFormat>::kHeaderRowBytes, g,
           chunk, minima);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE float scale(Unit& unit, int block, int row) const {
    if constexpr (kSuper) {
      return times_byte(unit, half_of(unit, scales.header, row), scales.rows[block] ^ 0x8080u, row,
                        128.0f);
    } else {
      return half_of(unit, scales.rows[block], row);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE float minimum(Unit& unit, int block, int row) const {
    if constexpr (kSuper) {
      return times_byte(unit, -half_of(unit, minima.header, row), minima.rows[block], row, 0.0f);
    } else {
      return half_of(unit, minima.rows[block], row);
    }
  }

 private:
  EFFINFER_DEVICE static void load(const uint8_t* first, const uint8_t* header, int g, int chunk,
                                   Numbers& out) {
    EFFINFER_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      const uint8_t* block = first + (chunk * kBlocks + i) * (kSuper ? 16 : 32);
      if constexpr (kSuper) {
        out.rows[i] = *reinterpret_cast<const uint16_t*>(block + g * 2);
      } else {
        out.rows[i] = *reinterpret_cast<const uint32_t*>(block + g * 4);
      }
    }
    if constexpr (kSuper) out.header = *reinterpret_cast<const uint32_t*>(header + g * 4);
  }
};

// A chunk of a lane's weights: loaded, and then as fragments.
template <ops::PackedFormat kFormat>
struct WgmmaWeights {
  static constexpr bool kSuper = kFormat.scales == ops::ScaleKind::super;
  static constexpr bool kWide = kFormat.bits == ops::QuantBits::u8;
  // A byte q beside constant ones is a float that is kBase more: 0x43 q 0 0 is 2^7 + q for q below
  // 128, 0x47 0 q 0 is 2^15 + q for any.
  static constexpr float kBase = kWide ? 0x1p15f : 0x1p7f;
  static constexpr float kZero = kBase + static_cast<float>(kFormat.zero);
  // Whether a scale times kZero is a float: not where a scale of 19 bits meets 9 more.
  static constexpr bool kFused = !(kSuper && kWide);

  ChunkQuants<kFormat.bits> quants;
  ChunkScales<kFormat> scales;

  EFFINFER_DEVICE void load(const uint8_t* group, const uint8_t* header, int lane, int chunk) {
    quants.load(group + lane / 4 * 8, lane % 4, chunk);
    scales.load(group, header, lane / 4, chunk);
  }

  template <class Unit>
  EFFINFER_DEVICE void fragments(Unit& unit, int lane, int chunk, ChunkFragments& a) const {
    const int t = lane % 4;
    float scale[2];
    float offset[2];
    EFFINFER_UNROLL
    for (int step = 0; step < kChunkSteps; ++step) {
      const int block = step * 16 / kFormat.sub_block;
      EFFINFER_UNROLL
      for (int row = 0; row < 2; ++row) {
        if (step * 16 % kFormat.sub_block == 0) {
          scale[row] = scales.scale(unit, block, row);
          float minimum = 0.0f;
          if constexpr (kFormat.has_min) minimum = scales.minimum(unit, block, row);
          offset[row] = kFused ? fmaf(-scale[row], kZero, minimum) : 0.0f;
        }
        EFFINFER_UNROLL
        for (int half = 0; half < 2; ++half) {
          const uint32_t four = quants.dword(chunk, step, half, row, t);
          a[step][2 * half + row] = unit.bf16x2(number(unit, four, t, 0, scale[row], offset[row]),
                                                number(unit, four, t, 1, scale[row], offset[row]));
        }
      }
    }
  }

 private:
  // That of byte t % 2 * 2 + i.
  template <class Unit>
  EFFINFER_DEVICE static float number(Unit& unit, uint32_t bytes, int t, int i, float scale,
                                      float offset) {
    const auto index = static_cast<uint32_t>(t % 2 * 2 + i);
    if constexpr (kWide) {
      const float value = float_of(unit.permute(bytes, 0x47000000u, 0x7404u | index << 4));
      return kFused ? fmaf(scale, value, offset) : scale * (value - kZero);
    } else {
      const uint32_t bits = unit.permute(bytes, 0x43000000u, 0x7044u | index << 8);
      return fmaf(scale, float_of(bits), offset);
    }
  }
};

// A line holds two k of 16 rows: what is read is a fragment, and is not read before its registers
// are free. ptxas ends each product at once where it finds such loads among those under way.
template <>
struct WgmmaWeights<kDenseBf16> {
  const uint8_t* lines;

  EFFINFER_DEVICE void load(const uint8_t* group, const uint8_t*, int lane, int chunk) {
    lines = group + lane / 4 * 8 + (16 * chunk + lane % 4) * 64;
  }
  template <class Unit>
  EFFINFER_DEVICE void fragments(Unit&, int, int, ChunkFragments& a) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Pair pair = load_rows(lines + i * 256);
      a[i / 2][i % 2 * 2] = pair.words[0];
      a[i / 2][i % 2 * 2 + 1] = pair.words[1];
    }
  }
};

// Half a line is one k of 16 rows.
template <>
struct WgmmaWeights<kDenseF16> {
  uint32_t rows[kChunkSteps][2][2];  // by step, half, k

  EFFINFER_DEVICE void load(const uint8_t* group, const uint8_t*, int lane, int chunk) {
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int k = 32 * chunk + 8 * (i / 2) + lane % 4 * 2 + i % 2;
      rows[i / 4][i / 2 % 2][i % 2] =
          *reinterpret_cast<const uint32_t*>(group + k * 32 + lane / 4 * 4);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE void fragments(Unit& unit, int, int, ChunkFragments& a) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      const auto& k = rows[i / 4][i % 4 / 2];
      a[i / 4][i % 4] = unit.bf16x2(half_of(unit, k[0], i % 2), half_of(unit, k[1], i % 2));
    }
  }
};

}  // namespace effinfer::cuda
