// The activations that a warp of stream_matmul.h multiplies, in shared memory: a ring of
// superblocks of each token, each warp's own. Memory's latency is several superblocks long: of few
// tokens three or two are on their way while one is multiplied, where blocks of 99 KB have room for
// them.
//
//   token's 128 bytes    32 bytes of step s at place s ^ (token % 4): the 32 lanes' reads of 8
//                        bytes, of 8 tokens each, then meet all banks evenly
#pragma once

#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

inline constexpr int kTileTokens = 8;  // columns of a product

template <int kTiles>
struct StreamTokens {
  static constexpr int kTokens = kTiles * kTileTokens;
  static constexpr int kPlaces = kTiles == 1 ? 4 : kTiles == 2 ? 3 : 2;
  static constexpr int kAhead = kPlaces - 1;
  alignas(128) uint8_t bytes[kPlaces][kTokens * ops::kSuperblock * 2];

  EFFINFER_DEVICE static int after(int place) { return place + 1 < kPlaces ? place + 1 : 0; }

  // Zeros for the tokens from `count` on, for good.
  template <class Unit>
  EFFINFER_DEVICE void clear(const Unit& unit, int count) {
    for (int i = count * 8 + unit.lane; i < kTokens * 8; i += kWarp) {
      EFFINFER_UNROLL
      for (auto& place : bytes) *reinterpret_cast<Quad*>(place + i * 16) = {};
    }
  }

  // The B fragment of a step: four k of token g of a tile.
  EFFINFER_DEVICE void fragment(int place, int tile, int step, int g, int t,
                                uint32_t (&b)[2]) const {
    const uint8_t* from =
        bytes[place] + (tile * kTileTokens + g) * 128 + (step ^ (g % 4)) * 32 + t * 8;
    memcpy(b, __builtin_assume_aligned(from, 8), 8);
  }
};

// What a lane copies of the activations of tokens x[0 .. count): 16 bytes of a superblock of tokens
// lane / 8, lane / 8 + 4, ..., which have one order of steps.
template <int kTiles>
struct TokenCopies {
  const uint8_t* from;  // in the next superblock
  int32_t four_rows;    // bytes between its tokens
  int offset;           // in shared memory
  int tokens;           // that it copies
  // Of the next one; with kAhead on their way it is the place of the one that is multiplied then.
  int place = 0;

  template <class Unit>
  EFFINFER_DEVICE TokenCopies(const Unit& unit, const uint8_t* x, int64_t row_bytes, int count,
                              int superblock)
      : four_rows(static_cast<int32_t>(4 * row_bytes)) {
    const int piece = unit.lane % 8;
    const int first = unit.lane / 8;
    from = x + superblock * (ops::kSuperblock * 2) + first * row_bytes + piece * 16;
    offset = first * 128 + ((piece / 2) ^ first) * 32 + piece % 2 * 16;
    tokens = (count - first + 3) / 4;
  }

  // Puts the next superblock on its way, if there is one.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, bool is_there, StreamTokens<kTiles>& out) {
    uint8_t* to = out.bytes[place] + offset;
    if (is_there) {
      EFFINFER_UNROLL
      for (int i = 0; i < kTiles * kTileTokens / 4; ++i) {
        if (i < tokens) unit.copy_async(to + i * (4 * 128), from + i * int64_t{four_rows});
      }
    }
    unit.commit();
    from += ops::kSuperblock * 2;
    place = out.after(place);
  }
};

}  // namespace effinfer::cuda
