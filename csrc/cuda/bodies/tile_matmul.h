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

// A lane's rows in unit `index` of a part. One that is none repeats the last group, and nobody
// takes its sums.
EFFINFER_DEVICE TilePlace tile_place(const TileParams& p, const TilePart& part, int index,
                                     int lane) {
  const int half = lane / 16;
  const bool gated = p.glu != ops::UnaryOp::none;
  const MatmulWeight& weight = gated ? p.parts[half].weight : part.weight;
  return {row_group(weight, gated ? index : 2 * index + half),
          static_cast<uint32_t>(p.header_bytes), static_cast<uint32_t>(p.header_row_bytes)};
}

// The sums of a warp: C fragments of a pair of rows (tile_weights.h) and eight tokens. Element i is
// token 2 t + i % 2 of the tile and row 2 pair + i / 2 of the lane.
template <int kTiles>
struct TileSums {
  float values[kTiles][2][4];
};

// One step of a superblock after the other, of weights of one format.
template <ops::PackedFormat kFormat, int kTiles, int kDepth, int kStages>
struct TileProduct {
  using Weights = TileWeights<kFormat>;
  static constexpr int kTokens = kTiles * kTileColumns;
  using Tokens = TileTokens<kTokens>;
  using Copies = TileCopies<kTokens, kTileWarps * kWarp>;
  static constexpr int kGroups = 4;  // of tiles, between which weights are unpacked
  static constexpr int kGroupTiles = kTiles / kGroups;

  // Adds all superblocks to `sums`.
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, int superblocks, const TilePlace& place,
                                  Copies& copies, Tokens (&ring)[kStages], TileSums<kTiles>& sums) {
    EFFINFER_UNROLL
    for (int i = 0; i < kStages - 1; ++i) {
      copies.fetch(unit, ring[i], i < superblocks);
      unit.commit();
    }
    Loads loads{place, superblocks};
    Weights raw[kDepth];
    loads.next(unit, raw[0], 0);
    TileFragments fragments[2];
    EFFINFER_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      raw[0].unpack(unit, 0, pair, unit.lane % 4, fragments[0].a[pair]);
    }
    constexpr int kFirst = kBlocks == 1 ? 0 : 1;  // of a superblock, the other block is there
    EFFINFER_UNROLL
    for (int i = kFirst; i < kDepth && !kDirect; ++i) {
      loads.next(unit, raw[(i + 1 - kFirst) % kDepth], i + 1);
    }
    for (int base = 0; base < superblocks; base += kDepth) {
      EFFINFER_UNROLL
      for (int i = 0; i < kDepth; ++i) {
        const int superblock = base + i;
        if (superblock >= superblocks) break;
        unit.template wait<kStages - 2>();
        unit.sync();  // it is there for all, and all have read what the next copies replace
        copies.fetch(unit, ring[(superblock + kStages - 1) % kStages],
                     superblock + kStages - 1 < superblocks);
        unit.commit();
        const Tokens& tokens = ring[superblock % kStages];
        multiply_block<0>(unit, tokens, loads, raw[kBlocks == 1 ? (2 * i + 1) % kDepth : i],
                          fragments, sums);
        multiply_block<1>(unit, tokens, loads,
                          raw[kBlocks == 1 ? (2 * i + 2) % kDepth : (i + 1) % kDepth], fragments,
                          sums);
      }
    }
    unit.template wait<0>();  // zeros, which are copied too
  }

 private:
  static constexpr int kBlocks = Weights::kLoaded;
  // Whether weights are fragments as they are loaded, and registers too short to hold them twice.
  static constexpr bool kDirect = kFormat == kDenseBf16 && kTiles >= 16;

  // Whether products wait in the source for all of their activations: with nvcc 13.0 most kernels
  // keep clear of spills so, and these without it.
  static constexpr bool kHeld = kFormat.bits != ops::QuantBits::u6 &&
                                !(kFormat.bits == ops::QuantBits::u5 &&
                                  kFormat.scales == ops::ScaleKind::direct && kFormat.has_min);

  // What a lane loads next. Behind the end it is the last superblock once more, which nobody
  // multiplies: loads without conditions need no registers for what they would leave.
  struct Loads {
    const TilePlace& place;
    const int superblocks;
    int superblock = 0;

    // Load number `count` from the start, as far as its block goes.
    template <class Unit>
    EFFINFER_DEVICE void next(Unit& unit, Weights& raw, int count) {
      const int first = kBlocks == 1 ? count % 2 : 0;
      const int index = superblock < superblocks ? superblock : superblocks - 1;
      raw.load(unit, place, static_cast<uint32_t>(index), first);
      if (first == 2 - kBlocks) ++superblock;
    }
  };

  // Block kBlock of a superblock, and the fragments of the block that follows from `raw`, which is
  // loaded anew as soon as nobody needs it.
  template <int kBlock, class Unit>
  EFFINFER_DEVICE static void multiply_block(Unit& unit, const Tokens& tokens, Loads& loads,
                                             Weights& raw, TileFragments (&fragments)[2],
                                             TileSums<kTiles>& sums) {
    constexpr int kNext = 1 - kBlock;
    if constexpr (kDirect) {
      Weights next;
      loads.next(unit, next, kBlock + 1);
      fragments[kNext] = next.fragments;
    }
    // A load is unpacked late, so that it has arrived, but the second block of a superblock early,
    // so that the next may be loaded early.
    constexpr int kFrom = kBlocks == 2 && kBlock == 0 ? 0 : kGroups / 2;
    EFFINFER_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      multiply(unit, fragments[kBlock], tokens, kBlock, group, sums);
      const int pair = group - kFrom;
      if (kDirect || pair < 0 || pair > 1) continue;
      raw.unpack(unit, kNext, pair, unit.lane % 4, fragments[kNext].a[pair]);
      if (pair == 1 && (kBlocks == 1 || kBlock == 0)) loads.next(unit, raw, kBlock + 1 + kDepth);
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
    if constexpr (kHeld) unit.keep_order();
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
