// The activations of a block of tile_matmul.h, in shared memory: a superblock of 64 k of all its
// tokens at a time.
//
//   token's 128 bytes    16 bytes of k = 8 n .. 8 n + 7 at place n, or n ^ 4 for odd tokens: the
//                        reads of 16 bytes by eight lanes, of two tokens each, then meet all banks
#pragma once

#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

inline constexpr int kTileColumns = 8;  // tokens of a product

template <int kTokens>
struct TileTokens {
  static constexpr int kRowBytes = static_cast<int>(ops::kSuperblock) * 2;
  alignas(128) uint8_t bytes[kTokens * kRowBytes];

  // Of lane (g, t) and block b of 32 k: the B fragments of token g of a tile for both steps.
  EFFINFER_DEVICE Quad fragments(int tile, int b, int g, int t) const {
    const int place = (4 * b + t) ^ (g % 2 * 4);
    return *reinterpret_cast<const Quad*>(bytes + (tile * kTileColumns + g) * kRowBytes +
                                          place * 16);
  }
};

// What a thread of `kThreads` copies of the activations of tokens x[0 .. count): 16 bytes of a
// superblock of every kThreads / 8th token.
template <int kTokens, int kThreads>
struct TileCopies {
  static constexpr int kStep = kThreads / 8;
  static constexpr int kPasses = kTokens / kStep;
  static_assert(kPasses > 0);
  const uint8_t* from;  // in the next superblock
  int64_t step_bytes;   // between its tokens
  int offset;           // in shared memory
  int tokens;           // that it copies

  template <class Unit>
  EFFINFER_DEVICE TileCopies(const Unit& unit, const uint8_t* x, int64_t row_bytes, int count)
      : step_bytes(kStep * row_bytes) {
    const int piece = unit.thread % 8;
    const int first = unit.thread / 8;
    from = x + first * row_bytes + piece * 16;
    offset = first * TileTokens<kTokens>::kRowBytes + (piece ^ (first % 2 * 4)) * 16;
    tokens = first < count ? (count - first + kStep - 1) / kStep : 0;
  }

  // Puts the next superblock on its way, with zeros for the tokens that are none.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, TileTokens<kTokens>& out) {
    uint8_t* to = out.bytes + offset;
    const uint8_t* row = from;
    EFFINFER_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      unit.copy_async(to + i * (kStep * TileTokens<kTokens>::kRowBytes), row, i < tokens);
      row += step_bytes;
    }
    from += TileTokens<kTokens>::kRowBytes;
  }
};

}  // namespace effinfer::cuda
