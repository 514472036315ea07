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
// Weights go from memory to registers, kDepth superblocks ahead, and from there to fragments half a
// superblock ahead, between the products, so that the tensor cores have work while others unpack.
// Activations go through a ring of kStages superblocks in shared memory.
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
  const uint8_t* x = nullptr;
  int64_t x_row_bytes = 0;
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

// The rows of a part that a block takes.
struct TileBlock {
  const TilePart* part;
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
  const TilePart* part = p.parts;
  while (row_block >= (part->units + kUnits - 1) / kUnits) {
    row_block -= (part++->units + kUnits - 1) / kUnits;
  }
  const int first_token = token_block * kTokens;
  const int tokens = p.tokens - first_token;
  return {part, row_block * kUnits, first_token, tokens < kTokens ? tokens : kTokens};
}

// A lane's rows in unit `index` of a part. One that is none repeats the last group, and nobody
// takes its sums.
EFFINFER_DEVICE TilePlace tile_place(const TileParams& p, const TilePart& part, int index,
                                     int lane) {
  const int half = lane / 16;
  const bool gated = p.glu != ops::UnaryOp::none;
  const GroupPlace group = group_place(gated ? p.parts[half].weight : part.weight,
                                       gated ? index : 2 * index + half, p.header_bytes, lane);
  return {group.superblocks, group.header, p.header_row_bytes, lane % 4, lane / 4 % 4};
}

// The sums of a warp: C fragments of a pair of rows (tile_weights.h) and eight tokens. Element i is
// token 2 t + i % 2 of the tile and row 2 pair + i / 2 of the lane.
template <int kTiles>
struct TileSums {
  float values[kTiles][2][4];
};

// The weights of a block of 32 k of a lane's rows.
struct TileFragments {
  uint32_t a[2][2][4];  // by pair, step
};

// One step of a superblock after the other, of weights of one format.
template <ops::PackedFormat kFormat, int kTiles, int kDepth, int kStages>
struct TileProduct {
  using Weights = TileWeights<kFormat>;
  static constexpr int kTokens = kTiles * kTileColumns;
  using Tokens = TileTokens<kTokens>;
  using Copies = TileCopies<kTokens, kTileWarps * kWarp>;
  static constexpr int kGroups = 4;  // of tiles, between which weights unpack
  static constexpr int kGroupTiles = kTiles / kGroups;

  // Adds all superblocks to `sums`.
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, int superblocks, TilePlace place, Copies& copies,
                                  Tokens (&ring)[kStages], TileSums<kTiles>& sums) {
    EFFINFER_UNROLL
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < superblocks) copies.fetch(unit, ring[i]);
      unit.commit();
    }
    Weights raw[kDepth];
    int next = 0;
    EFFINFER_UNROLL
    for (int i = 0; i < kDepth; ++i) {
      if (next < superblocks) load(unit, raw[i], place, next);
    }
    TileFragments fragments[2];
    EFFINFER_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      raw[0].unpack(unit, 0, pair, unit.lane % 4, fragments[0].a[pair]);
    }
    for (int base = 0; base < superblocks; base += kDepth) {
      EFFINFER_UNROLL
      for (int i = 0; i < kDepth; ++i) {
        const int superblock = base + i;
        if (superblock >= superblocks) break;
        unit.template wait<kStages - 2>();
        unit.sync();  // it is there for all, and all have read what the next copies replace
        if (superblock + kStages - 1 < superblocks) {
          copies.fetch(unit, ring[(superblock + kStages - 1) % kStages]);
        }
        unit.commit();
        const Tokens& tokens = ring[superblock % kStages];
        // Unpacks early, so that what comes next may be loaded early, ...
        EFFINFER_UNROLL
        for (int group = 0; group < kGroups; ++group) {
          multiply(unit, fragments[0], tokens, 0, group, sums);
          unpack_between(unit, raw[i], 1, group, fragments[1]);
          if (group == (kGroups - 1) / 2 && next < superblocks) load(unit, raw[i], place, next);
        }
        // ... and late, so that it has arrived.
        EFFINFER_UNROLL
        for (int group = 0; group < kGroups; ++group) {
          multiply(unit, fragments[1], tokens, 1, group, sums);
          unpack_between(unit, raw[(i + 1) % kDepth], 0, group - kGroups / 2, fragments[0]);
        }
      }
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void load(Unit& unit, Weights& raw, TilePlace& place, int& next) {
    raw.load(unit, place, next);
    place.superblock += ops::superblock_bytes(kFormat);
    ++next;
  }

  // Both pairs in the groups from 0 to half of them.
  template <class Unit>
  EFFINFER_DEVICE static void unpack_between(Unit& unit, const Weights& raw, int b, int group,
                                             TileFragments& out) {
    constexpr int kAtOnce = 4 / kGroups;
    EFFINFER_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int pair = group * kAtOnce + i;
      if (pair >= 0 && pair < 2) raw.unpack(unit, b, pair, unit.lane % 4, out.a[pair]);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const TileFragments& weights,
                                       const Tokens& tokens, int b, int group,
                                       TileSums<kTiles>& sums) {
    Quad x[kGroupTiles];
    EFFINFER_UNROLL
    for (int i = 0; i < kGroupTiles; ++i) {
      x[i] = tokens.fragments(group * kGroupTiles + i, b, unit.lane / 4, unit.lane % 4);
    }
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
