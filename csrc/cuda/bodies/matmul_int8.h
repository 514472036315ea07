// Quantised weights times int8 operands, with the CPU's bits: its one sequence of operations is
// drawn in cpu/matmul_int8.simd.cpp.
//
// A block takes 16 rows of the weight and up to eight tokens. Its eight warps take turns at the
// superblocks: sums of 16 k are exact products of the tensor cores, half of whose k are empty, as
// each 16 have a scale of their own. Scaled, they go through shared memory to a thread for each row
// and token, which adds them up in the order of k. Few tokens leave columns of the products empty:
// it is there for its bits, streams are what is fast.
#pragma once

#include <cmath>

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/bodies/matmul_f32.h"
#include "cuda/unit.h"
#include "ops/operand.h"

namespace effinfer::cuda {

struct Int8Params {
  const uint8_t* x = nullptr;
  int64_t x_row_bytes = 0;
  int32_t padded = 0;  // columns
  int32_t tokens = 0;
  int32_t token_blocks = 0;
  int64_t header_row_bytes = 0;
  FloatPart part;
};

struct Int8Matmul {
  static constexpr const char* kName = "matmul_int8";
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kMinBlocks = 3;
  static constexpr int kRows = 16;
  static constexpr int kTokens = 8;
  static constexpr int kMostBlocks = 4;  // scales of a row in a superblock
  using Params = Int8Params;
  struct Shared {
    float products[kWarps][kMostBlocks][kTokens][kRows];
    FloatRow::Affine affines[kWarps][kMostBlocks][kRows];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const int group = unit.block / p.token_blocks;
    const int first_token = unit.block % p.token_blocks * kTokens;
    const int count = p.tokens - first_token < kTokens ? p.tokens - first_token : kTokens;
    const int superblocks = p.padded / static_cast<int>(ops::kSuperblock);
    const int row = unit.thread % kRows;
    const int token = unit.thread / kRows;
    float sum = 0.0f;
    for (int first = 0; first < superblocks; first += kWarps) {
      if (first + unit.warp < superblocks) {
        multiply(unit, p, group, first + unit.warp, first_token, count, shared);
      }
      unit.sync();
      const int last = superblocks - first < kWarps ? superblocks - first : kWarps;
      if (token < count) {
        add(unit, p, first, last, first_token + token, token, row, shared, sum);
      }
      unit.sync();
    }
    const int output = group * kRows + row;
    if (token >= count || output >= p.part.weight.rows) return;
    finish_output(unit, p.part.weight, p.part.weight, ops::UnaryOp::none, {}, first_token + token,
                  output, sum, 0.0f);
  }

 private:
  // Parts of a token's record (ops/operand.h).
  struct Token {
    EFFINFER_DEVICE Token(const Params& p, int64_t token)
        : q(p.x + token * p.x_row_bytes),
          scales(reinterpret_cast<const float*>(q + p.padded)),
          biases(reinterpret_cast<const int32_t*>(q + p.padded + p.padded / 4)),
          scaled(reinterpret_cast<const float*>(q + p.padded + p.padded / 2)) {}
    const uint8_t* q;
    const float* scales;
    const int32_t* biases;
    const float* scaled;
  };

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, int group, int superblock,
                                       int first_token, int count, Shared& shared) {
    const ops::PackedFormat& format = p.part.format;
    const uint8_t* header = p.part.weight.data + group * p.part.weight.group_bytes;
    const uint8_t* data =
        header + p.part.header_bytes + int64_t{superblock} * p.part.superblock_bytes;
    const auto row_of = [&](int row) {
      return FloatRow{&p.part, header, data, p.header_row_bytes, superblock, row};
    };
    const int blocks = static_cast<int>(ops::kSuperblock) / format.sub_block;
    for (int i = unit.lane; i < blocks * kRows; i += kWarp) {
      shared.affines[unit.warp][i / kRows][i % kRows] = row_of(i % kRows).affine(unit, i / kRows);
    }
    // Bytes are signed for the tensor cores.
    const bool is_byte = format.bits == ops::QuantBits::u8;
    const uint32_t flip = is_byte ? 0x80808080u : 0u;
    const int offset = (is_byte ? 128 : 0) - format.zero;
    const int g = unit.lane / 4;
    const int t = unit.lane % 4;
    float before[4] = {};
    EFFINFER_NO_UNROLL
    for (int part = 0; part < 4; ++part) {
      const int line = 4 * part + t;
      const uint32_t a[4] = {row_of(g).quants(unit, line) ^ flip,
                             row_of(g + 8).quants(unit, line) ^ flip, 0, 0};
      uint32_t b[2] = {};
      if (g < count) {
        const auto* q = reinterpret_cast<const uint32_t*>(Token(p, first_token + g).q);
        b[0] = unit.load(q + superblock * 16 + line);
      }
      int32_t sums[4] = {};
      unit.mma_s8(sums, a, b);
      const int block = superblock * 4 + part;
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int column = 2 * t + i % 2;
        if (column >= count) continue;
        const Token token(p, first_token + column);
        // Biases are -128 times the sum of what the zero is added to.
        const int32_t exact = sums[i] - unit.load(token.biases + block) / 128 * offset;
        const auto value = static_cast<float>(exact);
        const float scale = unit.load(token.scales + block);
        float* products = shared.products[unit.warp][0][column] + g + i / 2 * 8;
        if (format.sub_block == 16) {
          products[part * kTokens * kRows] = unit.mul(value, scale);
        } else if (part % 2 == 0) {
          before[i] = unit.mul(value, scale);
        } else {
          products[part / 2 * kTokens * kRows] = fmaf(value, scale, before[i]);
        }
      }
    }
  }

  // What `count` superblocks from `first` on add to a row's sum.
  template <class Unit>
  EFFINFER_DEVICE static void add(Unit& unit, const Params& p, int first, int count,
                                  int64_t token_index, int token, int row, const Shared& shared,
                                  float& sum) {
    const ops::PackedFormat& format = p.part.format;
    const int blocks = static_cast<int>(ops::kSuperblock) / format.sub_block;
    const Token record(p, token_index);
    for (int i = 0; i < count; ++i) {
      for (int block = 0; block < blocks; ++block) {
        const FloatRow::Affine& affine = shared.affines[i][block][row];
        sum = fmaf(shared.products[i][block][token][row], affine.scale, sum);
        if (!format.has_min) continue;
        const int at = (first + i) * blocks + block;
        float scaled;
        if (blocks == 2) {
          scaled = unit.load(record.scaled + at);
        } else {
          const auto bias = static_cast<float>(unit.load(record.biases + at));
          scaled = unit.mul(unit.load(record.scales + at), unit.mul(bias, -0x1p-7f));
        }
        sum = fmaf(affine.minimum, scaled, sum);
      }
    }
  }
};

}  // namespace effinfer::cuda
