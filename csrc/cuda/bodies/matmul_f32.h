// y = x W^T in float32, for weights of every format: what operands of float32 are multiplied by.
//
// A block takes 16 rows of a weight, one group (with GLU of both weights, one after the other), and
// each of its eight warps an eighth of k, or one of as many warps as there are superblocks, if
// these are fewer. Lane l multiplies row l % 16 with half l / 16 of each superblock: one chain of
// fused multiply-adds in the order of k. The halves are added, then the warps in their order. A
// token's sums are the same operations for any number of tokens.
//
// A lane reads 4 bytes of a line at a time, 16 lanes one line, and each token's activations again:
// bound by instructions, about 6 a weight at one token.
#pragma once

#include <cmath>

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/bodies/weight_scales.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// A weight of one of the formats, and where the parts of its groups lie.
struct FloatPart {
  MatmulWeight weight;
  ops::PackedFormat format;
  int32_t quant_bytes = 0;
  int32_t min_offset = 0;
  int32_t superblock_bytes = 0;
  int64_t header_bytes = 0;
};

struct FloatParams {
  const uint8_t* x = nullptr;
  int64_t x_row_bytes = 0;
  bool x_is_bf16 = false;
  int32_t tokens = 0;
  int32_t superblocks = 0;
  int32_t warps = 0;  // of a block
  int32_t token_blocks = 0;
  int32_t num_parts = 0;
  ops::UnaryOp glu = ops::UnaryOp::none;
  int64_t header_row_bytes = 0;
  FloatPart parts[ops::kMaxMatmulParts];
  OperandOut operand;
};

// Row `row` of one superblock of a group of any format, a field line (four k) at a time.
struct FloatRow {
  const FloatPart* part;
  const uint8_t* header;  // of the group
  const uint8_t* data;    // the superblock
  int64_t header_row_bytes;
  int superblock;
  int row;

  template <class T, class Unit>
  EFFINFER_DEVICE T number(Unit& unit, const uint8_t* array, int64_t index) const {
    return unit.load(reinterpret_cast<const T*>(array) + index);
  }
  template <class Unit>
  EFFINFER_DEVICE uint32_t dword(Unit& unit, int line) const {
    return number<uint32_t>(unit, data + line * 64, row);
  }

  // The four quants of field line n.
  template <class Unit>
  EFFINFER_DEVICE uint32_t quants(Unit& unit, int n) const {
    const ops::QuantBits bits = part->format.bits;
    if (bits == ops::QuantBits::u8) return dword(unit, n);
    uint32_t q = dword(unit, n % 8) >> n / 8 * 4 & 0x0f0f0f0fu;
    if (bits == ops::QuantBits::u5) {
      q |= (dword(unit, 8 + n / 8) >> n % 8 & 0x01010101u) << 4;
    } else if (bits == ops::QuantBits::u6) {
      q |= (dword(unit, 8 + n / 4) >> 2 * (n % 4) & 0x03030303u) << 4;
    }
    return q;
  }

  struct Affine {
    float scale;
    float minimum;
  };
  // Of block `block` of format.sub_block values.
  template <class Unit>
  EFFINFER_DEVICE Affine affine(Unit& unit, int block) const {
    const uint8_t* scales = data + part->quant_bytes;
    const uint8_t* minima = data + part->min_offset;
    const bool has_min = part->format.has_min;
    const int index = block * 16 + row;
    if (part->format.scales == ops::ScaleKind::direct) {
      return {unit.from_f16(number<uint16_t>(unit, scales, index)),
              has_min ? unit.from_f16(number<uint16_t>(unit, minima, index)) : 0.0f};
    }
    const int at = superblock / 4 * 16 + row;
    const float d = unit.from_f16(number<uint16_t>(unit, header, at));
    Affine affine = {d * static_cast<float>(number<int8_t>(unit, scales, index)), 0.0f};
    if (has_min) {
      const float dmin = unit.from_f16(number<uint16_t>(unit, header + header_row_bytes, at));
      affine.minimum = -(dmin * static_cast<float>(number<uint8_t>(unit, minima, index)));
    }
    return affine;
  }

  // Number k of a dense superblock.
  template <class Unit>
  EFFINFER_DEVICE float dense(Unit& unit, int k) const {
    switch (part->format.bits) {
      case ops::QuantBits::f32:
        return number<float>(unit, data, k * 16 + row);
      case ops::QuantBits::f16:
        return unit.from_f16(number<uint16_t>(unit, data, k * 16 + row));
      default:
        return float_of(uint32_t{number<uint16_t>(unit, data, (k / 2 * 16 + row) * 2 + k % 2)}
                        << 16);
    }
  }

  // The weights of field line n, with the affine of their block.
  template <class Unit>
  EFFINFER_DEVICE void weights(Unit& unit, int n, const Affine& affine, float (&out)[4]) const {
    if (part->format.scales == ops::ScaleKind::dense) {
      EFFINFER_UNROLL
      for (int j = 0; j < 4; ++j) out[j] = dense(unit, 4 * n + j);
      return;
    }
    const uint32_t q = quants(unit, n);
    EFFINFER_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int value = static_cast<int>(q >> 8 * j & 255) - part->format.zero;
      // With the roundings of ops::unpack_row().
      out[j] = unit.mul(affine.scale, static_cast<float>(value)) + affine.minimum;
    }
  }
};

template <int kTokens>
struct FloatMatmul {
  static constexpr const char* kName = "matmul_f32";
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kMinBlocks = kTokens == 1 ? 5 : 3;
  static constexpr int kRows = 16;
  using Params = FloatParams;
  struct Shared {
    float sums[2][kWarps][kTokens][kRows];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const bool gated = p.glu != ops::UnaryOp::none;
    const int first_token = unit.block % p.token_blocks * kTokens;
    const int left = p.tokens - first_token;
    const int count = left < kTokens ? left : kTokens;
    int group = unit.block / p.token_blocks;
    const FloatPart* part = p.parts;
    if (!gated) {
      while (group >= part->weight.groups) group -= (part++)->weight.groups;
    }
    for (int i = 0; i < (gated ? 2 : 1); ++i) {
      multiply(unit, p, part[i], group, first_token, count, shared.sums[i][unit.warp]);
    }
    unit.sync();
    finish(unit, p, part->weight, group, first_token, count, shared);
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, const FloatPart& part,
                                       int group, int first_token, int count,
                                       float (&out)[kTokens][kRows]) {
    const uint8_t* data = part.weight.data + group * part.weight.group_bytes;
    const int half = unit.lane / kRows;
    const auto part_of = [&](int warp) {
      return p.warps < kWarps ? warp : static_cast<int>(int64_t{p.superblocks} * warp / kWarps);
    };
    const int first = part_of(unit.warp);
    const int last = part_of(unit.warp + 1);
    float sums[kTokens] = {};
    for (int superblock = first; superblock < last; ++superblock) {
      const FloatRow row = {&part,
                            data,
                            data + part.header_bytes + int64_t{superblock} * part.superblock_bytes,
                            p.header_row_bytes,
                            superblock,
                            unit.lane % kRows};
      add_half(unit, p, row, half, first_token, count, sums);
    }
    for (int token = 0; token < kTokens; ++token) {
      if (token >= count) break;
      const float sum = sums[token] + unit.shfl_xor(sums[token], kRows);
      if (half == 0) out[token][unit.lane % kRows] = sum;
    }
  }

  // Field lines 8 half .. 8 half + 7 of a superblock.
  template <class Unit>
  EFFINFER_DEVICE static void add_half(Unit& unit, const Params& p, const FloatRow& row, int half,
                                       int first_token, int count, float (&sums)[kTokens]) {
    const ops::PackedFormat& format = row.part->format;
    const bool dense = format.scales == ops::ScaleKind::dense;
    const int lines = format.sub_block == 16 ? 4 : 8;  // of a scale
    for (int first = 8 * half; first < 8 * half + 8; first += lines) {
      FloatRow::Affine affine = {};
      if (!dense) affine = row.affine(unit, first / lines);
      for (int n = first; n < first + lines; ++n) {
        float w[4];
        row.weights(unit, n, affine, w);
        const int64_t k = int64_t{row.superblock} * ops::kSuperblock + 4 * n;
        add_line(unit, p, p.x + first_token * p.x_row_bytes, k, count, w, sums);
      }
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void add_line(Unit& unit, const Params& p, const uint8_t* rows, int64_t k,
                                       int count, const float (&w)[4], float (&sums)[kTokens]) {
    EFFINFER_UNROLL
    for (int token = 0; token < kTokens; ++token) {
      if (token < count) {
        add_four(w, load_x(unit, p, rows + token * p.x_row_bytes, k), sums[token]);
      }
    }
  }
  EFFINFER_REGISTERS EFFINFER_DEVICE static void add_four(const float (&w)[4], Quad x, float& sum) {
    EFFINFER_UNROLL
    for (int j = 0; j < 4; ++j) sum = fmaf(w[j], float_of(x.words[j]), sum);
  }

  // Four numbers of a row, as bits of float32.
  template <class Unit>
  EFFINFER_DEVICE static Quad load_x(Unit& unit, const Params& p, const uint8_t* row, int64_t k) {
    if (!p.x_is_bf16) return unit.load(reinterpret_cast<const Quad*>(row + k * 4));
    const uint64_t four = unit.load(reinterpret_cast<const uint64_t*>(row + k * 2));
    return widened(four);
  }
  EFFINFER_REGISTERS EFFINFER_DEVICE static Quad widened(uint64_t four) {
    Quad x;
    EFFINFER_UNROLL
    for (int j = 0; j < 4; ++j) x.words[j] = static_cast<uint32_t>(four >> 16 * j) << 16;
    return x;
  }

  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const Params& p, const MatmulWeight& weight,
                                     int group, int first_token, int count, const Shared& shared) {
    EFFINFER_NO_UNROLL
    for (int i = unit.thread; i < count * kRows; i += p.warps * kWarp) {
      const int token = i / kRows;
      const int row = group * kRows + i % kRows;
      if (row >= weight.rows) continue;
      float sum = 0;
      float second = 0;
      EFFINFER_NO_UNROLL
      for (int warp = 0; warp < p.warps; ++warp) {
        sum += shared.sums[0][warp][token][i % kRows];
        if (p.glu != ops::UnaryOp::none) second += shared.sums[1][warp][token][i % kRows];
      }
      finish_output(unit, weight, p.parts[1].weight, p.glu, p.operand, first_token + token, row,
                    sum, second);
    }
    if (group + 1 == weight.groups) {
      pad_operand(unit, p.operand, weight.rows, first_token, first_token + count, unit.thread,
                  p.warps * kWarp);
    }
  }
};

}  // namespace effinfer::cuda
