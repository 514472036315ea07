// The activations of a block of tile_matmul.h, in shared memory: a superblock of 64 k of all its
// tokens at a time.
//
//   token's 128 bytes    16 bytes of k = 8 n .. 8 n + 7 at place n, or n ^ 4 for odd tokens: the
//                        reads of 16 bytes by eight lanes, of two tokens each, then meet all banks
#pragma once

#include "cuda/unit.h"
#include "ops/operand.h"
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

// Activations, as a kernel's parameters: constants that take no registers.
struct TileX {
  static constexpr int kMostPasses = 4;
  const uint8_t* data = nullptr;
  int64_t row_bytes = 0;
  uint32_t pass_bytes[kMostPasses] = {};  // from the first to the tokens of each pass
};

// What number `thread` of `kThreads` copies of a block's activations: 16 bytes of a superblock of
// every kThreads / 8th token, one a pass.
template <int kTokens, int kThreads>
struct TileCopies {
  static constexpr int kStep = kThreads / 8;
  static constexpr int kPasses = kTokens / kStep;
  static_assert(kPasses > 0 && kPasses <= TileX::kMostPasses);
  const TileX& x;
  const uint8_t* from;  // in the next superblock
  int offset;           // in shared memory
  int tokens;           // that it copies

  // Of the host.
  static TileX x_of(const ops::Operand& operand) {
    TileX x{static_cast<const uint8_t*>(operand.data), operand.row_bytes()};
    for (int i = 0; i < kPasses; ++i) {
      x.pass_bytes[i] = static_cast<uint32_t>(i * kStep * operand.row_bytes());
    }
    return x;
  }

  // Of tokens [first_token, first_token + count).
  EFFINFER_DEVICE TileCopies(int thread, const TileX& of, int first_token, int count) : x(of) {
    const int piece = thread % 8;
    const int first = thread / 8;
    from = x.data + (first_token + first) * x.row_bytes + piece * 16;
    offset = first * TileTokens<kTokens>::kRowBytes + (piece ^ (first % 2 * 4)) * 16;
    tokens = first < count ? (count - first + kStep - 1) / kStep : 0;
  }

  // Puts the next superblock on its way, if there is one: with zeros for the tokens that are none.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, TileTokens<kTokens>& out, bool exists) {
    if (!exists) tokens = 0;
    uint8_t* to = out.bytes + offset;
    EFFINFER_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      unit.copy_async(to + i * (kStep * TileTokens<kTokens>::kRowBytes), from + x.pass_bytes[i],
                      i < tokens);
    }
    from += TileTokens<kTokens>::kRowBytes;
  }
};

}  // namespace effinfer::cuda
