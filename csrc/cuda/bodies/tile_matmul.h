// y = x W^T for many tokens: what a prompt's matmuls run. Weights are read as they are packed and
// become bfloat16 in registers, scales included (tile_weights.h); activations are bfloat16.
//
// A block of eight warps multiplies 256 rows with kTokens tokens. Each warp takes 32 rows ("a
// unit": two groups of a weight; with GLU one group of each of the two) and all tokens of the
// block:
//
//   - so no weight is unpacked by two warps. With 128 tokens, unpacking 16 x 16 weights takes some
//     25 instructions for 16 products;
//   - 32 rows, as a fragment of activations that is read from shared memory (256 bytes) then serves
//     two products. One product for each would need the whole bandwidth of shared memory of an
//     A100: two cycles for a product, and two for what it reads;
//   - 32 rows x 128 tokens are 128 registers of sums. 64 x 64 would read half as much of shared
//     memory, but unpack twice as often.
//
// Weights and activations come by asynchronous copies to rings in shared memory. Weights become
// fragments half a superblock ahead, between the products, so that the tensor cores have work while
// others unpack.
//
// A sum is made by one chain of products in the order of k, whatever the tile of tokens and the
// kernel (tile_rows.h is the one for few tokens): a token's bits do not depend on how many there
// are, nor on what the others hold.
#pragma once

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/bodies/row_groups.h"
#include "cuda/bodies/tile_tokens.h"
#include "cuda/bodies/tile_weights.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

inline constexpr int kTileWarps = 8;

struct TilePart {
  MatmulWeight weight;
  int32_t units = 0;  // of 32 rows, or 16 of each weight of a GLU
  bool fours = false;
};

// Weights of one format, times all tokens. With GLU the second part is the linear one.
struct TileParams {
  TileX x;
  int32_t tokens = 0;
  int32_t superblocks = 0;
  int32_t token_blocks = 0;  // of the kernel's tokens
  int32_t row_blocks = 0;    // of all parts
  ops::UnaryOp glu = ops::UnaryOp::none;
  int64_t header_bytes = 0;      // of a group
  int64_t header_row_bytes = 0;  // of the scales in it
  TilePart parts[ops::kMaxMatmulParts];
  OperandOut operand;
};

// The rows of part number `part` that a block takes.
struct TileBlock {
  int part;
  int first_unit;
  int first_token;
  int num_tokens;
};

// Which tile a block has. Blocks that run at the same time share what they read through the L2
// cache: of up to kBand blocks of tokens each takes the same rows before they go on to the next.
template <int kUnits, int kTokens>
EFFINFER_DEVICE TileBlock tile_block(const TileParams& p, int block) {
  constexpr int kBand = 8;
  const int band = block / (kBand * p.row_blocks);
  const int left = p.token_blocks - band * kBand;
  const int width = left < kBand ? left : kBand;
  const int rest = block - band * kBand * p.row_blocks;
  const int token_block = band * kBand + rest % width;
  int row_block = rest / width;
  int part = 0;
  while (row_block >= (p.parts[part].units + kUnits - 1) / kUnits) {
    row_block -= (p.parts[part++].units + kUnits - 1) / kUnits;
  }
  const int first_token = token_block * kTokens;
  const int tokens = p.tokens - first_token;
  return {part, row_block * kUnits, first_token, tokens < kTokens ? tokens : kTokens};
}

// The group of a lane's rows in unit `index` of a part. One that is none repeats the last group,
// and nobody takes its sums.
EFFINFER_DEVICE const uint8_t* tile_group(const TileParams& p, const TilePart& part, int index,
                                          int lane) {
  const int half = lane / 16;
  const bool gated = p.glu != ops::UnaryOp::none;
  return row_group(gated ? p.parts[half].weight : part.weight, gated ? index : 2 * index + half);
}

// The sums of a warp: C fragments of a pair of rows (tile_weights.h) and eight tokens. Element i is
// token 2 t + i % 2 of the tile and row 2 pair + i / 2 of the lane.
template <int kTiles>
struct TileSums {
  float values[kTiles][2][4];
};

// What a block multiplies, on its way: weights in places of each warp's, activations in stages.
// Both come as far ahead as the products of a superblock with 128 tokens take, which are 2048
// cycles of an A100 and more of others.
template <ops::PackedFormat kFormat, int kTokens>
struct TileRing {
  static constexpr int kParts = 4 / PlaceOf<kFormat>::kSteps;  // places of a superblock
  static constexpr int kPlaces = kParts + 128 / kTokens;
  static constexpr int kStages = 2 + 128 / kTokens;
  static_assert(kPlaces <= kStages);

  TileTokens<kTokens> tokens[kStages];
  alignas(128) uint8_t weights[kTileWarps][kPlaces][PlaceOf<kFormat>::kWeightBytes];
};

// One step of a superblock after the other, of weights of one format.
template <ops::PackedFormat kFormat, int kTiles>
struct TileProduct {
  using Weights = TileWeights<kFormat>;
  static constexpr int kTokens = kTiles * kTileColumns;
  using Tokens = TileTokens<kTokens>;
  using Copies = TileCopies<kTokens, kTileWarps * kWarp>;
  using Ring = TileRing<kFormat, kTokens>;
  static constexpr int kParts = Ring::kParts;
  static constexpr int kPlaces = Ring::kPlaces;
  static constexpr int kStages = Ring::kStages;
  using Places = WeightRing<kFormat, TilePieces<kFormat.bits>, kPlaces>;
  static constexpr int kGroups = 4;  // of tiles
  static constexpr int kGroupTiles = kTiles / kGroups;
  // With whose products weights are unpacked. Chosen by the machine code of nvcc 13.0.
  static constexpr int kLoadGroup = kParts == 1 ? 3 : 2;

  // Adds all superblocks to `sums`. Copies of activations are of the group of the weights after
  // them, so that who waits for the weights of a superblock waits for both.
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const TileParams& p, const uint8_t* group,
                                  Copies& copies, Ring& ring, TileSums<kTiles>& sums) {
    Places places = {{group, p.header_bytes, p.header_row_bytes, unit.lane, 0},
                     ring.weights[unit.warp],
                     p.superblocks * kParts};
    EFFINFER_UNROLL
    for (int i = 0; i < kStages - 1; ++i) {
      copies.fetch(unit, ring.tokens[i], i < p.superblocks);
      if (i < kPlaces - 1) places.fetch(unit, i);
    }
    Ahead ahead;
    int stage = 0;
    places.wait(unit);
    unit.sync();  // it is there for all
    ahead.place = places.advance(unit);
    ahead.load(unit, 0);
    ahead.unpack(unit, 0);
    EFFINFER_NO_UNROLL
    for (int left = p.superblocks; left > 0; --left) {
      const Tokens& tokens = ring.tokens[stage];
      multiply_block<0>(unit, tokens, ahead, sums, [&] {
        if constexpr (kParts == 2) ahead.place = places.next(unit);
      });
      multiply_block<1>(unit, tokens, ahead, sums, [&] {
        places.wait(unit);
        unit.sync();  // it is there for all, and all have read what the next copies replace
        copies.fetch(unit, ring.tokens[stage == 0 ? kStages - 1 : stage - 1], left >= kStages);
        ahead.place = places.advance(unit);
      });
      if (++stage == kStages) stage = 0;
    }
    unit.template wait<0>();  // zeros, which are copied too
  }

 private:
  // Fragments of the block that is multiplied and of the one that follows, which are unpacked
  // meanwhile.
  struct Ahead {
    const uint8_t* place;
    Weights raw;
    TileFragments fragments[2];

    template <class Unit>
    EFFINFER_DEVICE void load(Unit& unit, int b) {
      raw.load(place, b, unit.lane);
    }
    template <class Unit>
    EFFINFER_DEVICE void unpack(Unit& unit, int b) {
      EFFINFER_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        raw.unpack(unit, b, pair, unit.lane % 4, fragments[b].a[pair]);
      }
    }
  };

  // Block kBlock of a superblock, and the fragments of the next one, of the place that `advance`
  // leaves. Behind the end they are of what lies in the ring, and nobody multiplies them.
  template <int kBlock, class Unit, class Advance>
  EFFINFER_DEVICE static void multiply_block(Unit& unit, const Tokens& tokens, Ahead& ahead,
                                             TileSums<kTiles>& sums, Advance advance) {
    EFFINFER_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      if (group == kLoadGroup) {
        advance();
        ahead.load(unit, 1 - kBlock);
      }
      multiply(unit, ahead.fragments[kBlock], tokens, kBlock, group, sums);
      if (group == kLoadGroup) ahead.unpack(unit, 1 - kBlock);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const TileFragments& weights,
                                       const Tokens& tokens, int b, int group,
                                       TileSums<kTiles>& sums) {
    unit.keep_order();
    Quad x[kGroupTiles];
    EFFINFER_UNROLL
    for (int i = 0; i < kGroupTiles; ++i) {
      x[i] = tokens.fragments(group * kGroupTiles + i, b, unit.lane / 4, unit.lane % 4);
    }
    unit.keep_order();
    EFFINFER_UNROLL
    for (int j = 0; j < 2; ++j) {
      EFFINFER_UNROLL
      for (int i = 0; i < kGroupTiles; ++i) {
        EFFINFER_UNROLL
        for (int pair = 0; pair < 2; ++pair) {
          unit.mma(sums.values[group * kGroupTiles + i][pair], weights.a[pair][j],
                   {x[i].words[2 * j], x[i].words[2 * j + 1]});
        }
      }
    }
  }
};

}  // namespace effinfer::cuda
