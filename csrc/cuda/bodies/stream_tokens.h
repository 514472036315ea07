// The activations that a warp of stream_matmul.h multiplies, in shared memory: a superblock of each
// token at a time, each warp's own.
//
//   token's 128 bytes    32 bytes of step s at place s ^ (token % 4): the 32 lanes' reads of 8
//                        bytes, of 8 tokens each, then meet all banks evenly
#pragma once

#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

inline constexpr int kTileTokens = 8;  // columns of a product

// The activations of a warp: two superblocks of its tokens, of which one is on its way.
template <int kTiles>
struct StreamTokens {
  static constexpr int kTokens = kTiles * kTileTokens;
  alignas(128) uint8_t bytes[2][kTokens * ops::kSuperblock * 2];

  // Zeros for the tokens from `count` on, for good.
  template <class Unit>
  EFFINFER_DEVICE void clear(const Unit& unit, int count) {
    for (int i = count * 8 + unit.lane; i < kTokens * 8; i += kWarp) {
      *reinterpret_cast<Quad*>(bytes[0] + i * 16) = {};
      *reinterpret_cast<Quad*>(bytes[1] + i * 16) = {};
    }
  }

  // The B fragment of a step: four k of token g of a tile.
  EFFINFER_DEVICE void fragment(int superblock, int tile, int step, int g, int t,
                                uint32_t (&b)[2]) const {
    const uint8_t* from =
        bytes[superblock & 1] + (tile * kTileTokens + g) * 128 + (step ^ (g % 4)) * 32 + t * 8;
    memcpy(b, __builtin_assume_aligned(from, 8), 8);
  }
};

// What a lane copies of the activations of tokens x[0 .. count): 16 bytes of a superblock of tokens
// lane / 8, lane / 8 + 4, ..., which have one order of steps.
template <int kTiles>
struct TokenCopies {
  const uint8_t* from;  // in the next superblock
  int64_t four_rows;    // bytes between its tokens
  int offset;           // in shared memory
  int tokens;           // that it copies
  int next;             // superblock

  template <class Unit>
  EFFINFER_DEVICE TokenCopies(const Unit& unit, const uint8_t* x, int64_t row_bytes, int count,
                              int superblock)
      : four_rows(4 * row_bytes), next(superblock) {
    const int piece = unit.lane % 8;
    const int first = unit.lane / 8;
    from = x + superblock * (ops::kSuperblock * 2) + first * row_bytes + piece * 16;
    offset = first * 128 + ((piece / 2) ^ first) * 32 + piece % 2 * 16;
    tokens = (count - first + 3) / 4;
  }

  // Puts the next superblock on its way.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, StreamTokens<kTiles>& out) {
    uint8_t* to = out.bytes[next & 1] + offset;
    EFFINFER_UNROLL
    for (int i = 0; i < kTiles * kTileTokens / 4; ++i) {
      if (i < tokens) unit.copy_async(to + i * (4 * 128), from + i * four_rows);
    }
    unit.commit();
    from += ops::kSuperblock * 2;
    ++next;
  }
};

}  // namespace effinfer::cuda
