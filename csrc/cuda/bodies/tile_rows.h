// The sums of tile_matmul.h for few tokens or few rows, with the same bits: what a short prompt,
// the end of one, and small matrices run.
//
// A sum is one chain of products over all of k, which cannot be cut into slices, so what is left to
// share is the unpacking. A block has one unit, 32 rows, and goes on by 128 k, four blocks of 32.
// Four of its warps bring weights and activations by asynchronous copies, unpack one block each and
// leave the fragments in shared memory. The others multiply those of the 128 k before: each one
// pair of rows with one tile of tokens (64 tokens: with two, a fragment of weights read from shared
// memory then serves twice).
//
// The chain bounds it, with 16 tokens or fewer: 128 k are 8 products that wait for each other, some
// 33 cycles each, in which a warp that unpacks issues 170 (Q8_0) to 240 (Q4_K) instructions.
#pragma once

#include "cuda/bodies/tile_block.h"

namespace effinfer::cuda {

template <ops::PackedFormat kFormat, int kTiles>
struct TileRows {
  static constexpr const char* kName = "tile_rows";
  static constexpr int kReplacedOn = 90;  // by wgmma_matmul.h
  static constexpr int kMinBlocks = kTiles < 4 ? 2 : 1;
  static constexpr int kTokens = kTiles * kTileColumns;
  static constexpr int kBlocks = 4;  // of 32 k, at a time
  static constexpr int kTwo = 2;     // superblocks they are
  static constexpr int kWarpTiles = kTiles < 8 ? 1 : kTiles / 4;
  static constexpr int kMultiplyWarps = 2 * kTiles / kWarpTiles;
  static constexpr int kThreads = (kMultiplyWarps + kBlocks) * kWarp;
  using Params = TileParams;
  using Weights = TileWeights<kFormat>;
  using Of = PlaceOf<kFormat>;
  static constexpr bool kDense = kFormat.scales == ops::ScaleKind::dense;
  static constexpr int kCopied = kBlocks * 2 / Of::kSteps;  // places of 128 k
  // Two blocks of few tokens have room for as many in the 100 KB of a multiprocessor.
  static constexpr int kStages = kDense && kTiles < 4 ? 2 : 3;
  static constexpr int kPlaces = kStages + 1;
  using WeightPieces = WeightCopies<kFormat, TilePieces<kFormat.bits>, kCopied>;
  using TokenPieces = TileCopies<kTokens, kBlocks * kWarp>;

  // Fragments: [block][step][pair][lane].
  using Unpacked = Quad[kBlocks][2][2][kWarp];
  using Places = uint8_t[kCopied][Of::kWeightBytes];
  struct Ring {
    TileTokens<kTokens> tokens[kStages][kTwo];
    alignas(128) Places places[kPlaces];
  };
  struct Shared {
    Unpacked weights[2];
    union {
      Ring ring;
      TileResults<kTokens> results;
    };
  };

  // Of the host.
  static TileX x_of(const ops::Operand& operand) { return TokenPieces::x_of(operand); }

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const TileBlock block = tile_block<1, kTokens>(p, unit.block);
    float sums[kWarpTiles][4] = {};
    multiply(unit, p, block, shared, sums);
    unit.sync();  // all have read the activations
    if (unit.warp < kMultiplyWarps) store(unit, sums, shared.results);
    unit.sync();
    const TilePart& part = p.parts[block.part];
    finish_tokens<1>(unit, p, part, block.first_unit, block.first_token, block.num_tokens,
                     shared.results, unit.thread, kThreads);
    if (block.first_unit + 1 == part.units) {
      pad_operand(unit, p.operand, part.weight.rows, block.first_token,
                  block.first_token + block.num_tokens, unit.thread, kThreads);
    }
  }

 private:
  // What a warp that unpacks copies: of each 128 k activations first, then weights, each a group.
  struct Copies {
    TokenPieces tokens;
    WeightPieces weights;
    const int b;           // of its block
    int left_superblocks;  // that have no copies yet
    int left_places;       // from its own on

    template <class Unit>
    EFFINFER_DEVICE void fetch_tokens(Unit& unit, TileTokens<kTokens> (&to)[kTwo]) {
      EFFINFER_UNROLL
      for (int i = 0; i < kTwo; ++i) {
        if (i < left_superblocks) tokens.fetch(unit, to[i], true);
      }
      left_superblocks -= kTwo;
      unit.commit();
    }
    template <class Unit>
    EFFINFER_DEVICE void fetch_weights(Unit& unit, Places& to) {
      if (b < kCopied) weights.fetch(unit, to[b], left_places > 0);
      left_places -= kCopied;
      unit.commit();
    }
  };

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, const TileBlock& block,
                                       Shared& shared, float (&sums)[kWarpTiles][4]) {
    Ring& ring = shared.ring;
    const bool unpacks = unit.warp >= kMultiplyWarps;
    const int b = unit.warp % kBlocks;
    Copies copies = {{unit.thread % (kBlocks * kWarp), p.x, block.first_token, block.num_tokens},
                     {tile_group(p, p.parts[block.part], block.first_unit, unit.lane),
                      p.header_bytes, p.header_row_bytes, unit.lane, b},
                     b,
                     p.superblocks,
                     p.superblocks * kCopied / kTwo - b};
    if (unpacks) {
      for (int i = 0; i < 2; ++i) copies.fetch_weights(unit, ring.places[i]);
      EFFINFER_UNROLL
      for (int i = 0; i < kStages - 1; ++i) {
        copies.fetch_tokens(unit, ring.tokens[i]);
        copies.fetch_weights(unit, ring.places[i + 2]);
      }
      unit.template wait<2 * kStages - 1>();
    }
    unit.sync();  // the first weights are there for all
    if (unpacks) unpack(unit, b, ring.places[0], shared.weights[0]);
    int stage = 0;
    int place = 0;
    int now = 0;  // of the fragments
    EFFINFER_NO_UNROLL
    for (int left = p.superblocks; left > 0; left -= kTwo) {
      // Of these activations and the next weights, which one step was between.
      if (unpacks) unit.template wait<2 * kStages - 3>();
      unit.sync();  // all is there, and all have read what is replaced now
      if (unpacks) {
        copies.fetch_tokens(unit, ring.tokens[stage == 0 ? kStages - 1 : stage - 1]);
        copies.fetch_weights(unit, ring.places[place]);
        if (++place == kPlaces) place = 0;
        unpack(unit, b, ring.places[place], shared.weights[1 - now]);
      } else if (left >= kTwo) {
        multiply_blocks<kBlocks>(unit, shared.weights[now], ring.tokens[stage], sums);
      } else {
        multiply_blocks<kBlocks / 2>(unit, shared.weights[now], ring.tokens[stage], sums);
      }
      if (++stage == kStages) stage = 0;
      now = 1 - now;
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void unpack(Unit& unit, int b, const Places& places, Unpacked& out) {
    const int of_place = kDense ? 0 : b % 2;
    Weights raw;
    raw.load(places[b * kCopied / kBlocks], of_place, unit.lane);
    EFFINFER_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t a[2][4];
      raw.unpack(unit, of_place, pair, unit.lane % 4, a);
      EFFINFER_UNROLL
      for (int j = 0; j < 2; ++j) {
        out[b][j][pair][unit.lane] = {{a[j][0], a[j][1], a[j][2], a[j][3]}};
      }
    }
  }

  // The first kCount blocks.
  template <int kCount, class Unit>
  EFFINFER_DEVICE static void multiply_blocks(Unit& unit, const Unpacked& weights,
                                              const TileTokens<kTokens> (&tokens)[kTwo],
                                              float (&sums)[kWarpTiles][4]) {
    const int pair = unit.warp % 2;
    const int tile = unit.warp / 2 * kWarpTiles;
    EFFINFER_UNROLL
    for (int b = 0; b < kCount; ++b) {
      Quad x[kWarpTiles];
      EFFINFER_UNROLL
      for (int i = 0; i < kWarpTiles; ++i) {
        x[i] = tokens[b / 2].fragments(tile + i, b % 2, unit.lane / 4, unit.lane % 4);
      }
      EFFINFER_UNROLL
      for (int j = 0; j < 2; ++j) {
        const Quad a = weights[b][j][pair][unit.lane];
        EFFINFER_UNROLL
        for (int i = 0; i < kWarpTiles; ++i) {
          unit.mma(sums[i], a.words, {x[i].words[2 * j], x[i].words[2 * j + 1]});
        }
      }
    }
  }

  // The warp's pair of rows of its tokens: half of each four of the results.
  template <class Unit>
  EFFINFER_DEVICE static void store(const Unit& unit, const float (&sums)[kWarpTiles][4],
                                    TileResults<kTokens>& results) {
    EFFINFER_UNROLL
    for (int i = 0; i < kWarpTiles; ++i) {
      results.store_pair(unit, unit.warp / 2 * kWarpTiles + i, unit.warp % 2, sums[i]);
    }
  }
};

}  // namespace effinfer::cuda
