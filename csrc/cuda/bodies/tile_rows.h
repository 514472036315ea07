// The sums of tile_matmul.h for few tokens or few rows, with the same bits: what a short prompt,
// the end of one, and small matrices run.
//
// A sum is one chain of products over all of k, which cannot be cut into slices, so what is left to
// share is the unpacking. A block has one unit, 32 rows. Of each four superblocks its eight warps
// unpack a block of 32 k each and leave the fragments in shared memory, while they multiply those
// of the four before: each warp one pair of rows with one tile of tokens (64 tokens: with two, a
// fragment of weights read from shared memory then serves twice).
//
// The chain bounds it, with 16 tokens or fewer: four superblocks are 16 products that wait for each
// other, some 33 cycles each. Weights of the next two times four superblocks are on their way.
#pragma once

#include "cuda/bodies/tile_block.h"

namespace effinfer::cuda {

template <ops::PackedFormat kFormat, int kTiles>
struct TileRows {
  static constexpr const char* kName = "tile_rows";
  static constexpr int kReplacedOn = 90;  // by wgmma_matmul.h
  static constexpr int kThreads = kTileWarps * kWarp;
  static constexpr int kMinBlocks = kTiles < 4 ? 2 : 1;
  static constexpr int kTokens = kTiles * kTileColumns;
  static constexpr int kFour = kTileWarps / 2;  // superblocks at a time
  static constexpr int kDepth = 2;              // times as many are loaded ahead
  static constexpr int kWarpTiles = kTiles < 8 ? 1 : kTiles / 4;
  static constexpr int kBusyWarps = 2 * kTiles / kWarpTiles;
  static_assert(kBusyWarps <= kTileWarps);
  using Params = TileParams;
  using Weights = TileWeights<kFormat>;

  // Fragments of four superblocks: [superblock, block][step][pair][lane].
  using Unpacked = Quad[2 * kFour][2][2][kWarp];
  struct Shared {
    Unpacked weights[2];
    union {
      TileTokens<kTokens> tokens[2][kFour];
      TileResults<kTokens> results;
    };
  };

  // Of the host.
  static TileX x_of(const ops::Operand& operand) {
    return {static_cast<const uint8_t*>(operand.data), operand.row_bytes()};
  }

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const TileBlock block = tile_block<1, kTokens>(p, unit.block);
    float sums[kWarpTiles][4] = {};
    multiply(unit, p, block, shared, sums);
    unit.template wait<0>();
    unit.sync();  // all have read the activations
    if (unit.warp < kBusyWarps) store(unit, sums, shared.results);
    unit.sync();
    const TilePart& part = p.parts[block.part];
    finish_tokens(unit, p, part, block.first_unit, block.first_token, block.num_tokens,
                  shared.results, unit.thread, kThreads);
    if (block.first_unit + 1 == part.units) {
      pad_operand(unit, p.operand, part.weight.rows, block.first_token,
                  block.first_token + block.num_tokens, unit.thread, kThreads);
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, const TileBlock& block,
                                       Shared& shared, float (&sums)[kWarpTiles][4]) {
    const TilePlace place = tile_place(p, p.parts[block.part], block.first_unit, unit.lane);
    Weights raw[kDepth];
    EFFINFER_UNROLL
    for (int i = 0; i < kDepth; ++i) load(unit, p, place, i, raw[i]);
    fetch(unit, p, block, 0, shared.tokens[0]);
    unpack(unit, raw[0], shared.weights[0]);
    load(unit, p, place, kDepth, raw[0]);
    const int fours = (p.superblocks + kFour - 1) / kFour;
    for (int base = 0; base < fours; base += kDepth) {
      EFFINFER_UNROLL
      for (int i = 0; i < kDepth; ++i) {
        const int four = base + i;
        if (four >= fours) break;
        unit.template wait<0>();
        unit.sync();  // all is there, and all have read what is replaced now
        fetch(unit, p, block, four + 1, shared.tokens[(i + 1) % 2]);
        Weights& next = raw[(i + 1) % kDepth];
        unpack(unit, next, shared.weights[(i + 1) % 2]);
        load(unit, p, place, four + 1 + kDepth, next);
        if (unit.warp < kBusyWarps) {
          const int left = p.superblocks - four * kFour;
          multiply_four(unit, shared.weights[i % 2], shared.tokens[i % 2],
                        left < kFour ? left : kFour, sums);
        }
      }
    }
  }
  static_assert(kDepth % 2 == 0);

  // Of the warp's block of 32 k in four number `four`, or in the last superblock if it is none.
  template <class Unit>
  EFFINFER_DEVICE static void load(Unit& unit, const Params& p, const TilePlace& place, int four,
                                   Weights& raw) {
    const int superblock = four * kFour + unit.warp / 2;
    const int last = p.superblocks - 1;
    raw.load(unit, place, static_cast<uint32_t>(superblock < last ? superblock : last),
             Weights::kLoaded == 1 ? unit.warp % 2 : 0);
  }

  template <class Unit>
  EFFINFER_DEVICE static void unpack(Unit& unit, const Weights& raw, Unpacked& out) {
    const auto of = [&](int b) {
      EFFINFER_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t a[2][4];
        raw.unpack(unit, b, pair, unit.lane % 4, a);
        EFFINFER_UNROLL
        for (int j = 0; j < 2; ++j) {
          out[unit.warp][j][pair][unit.lane] = {{a[j][0], a[j][1], a[j][2], a[j][3]}};
        }
      }
    };
    // Registers have no index.
    if (unit.warp % 2 == 0) {
      of(0);
    } else {
      of(1);
    }
  }

  // Puts the activations of a four on their way.
  template <class Unit>
  EFFINFER_DEVICE static void fetch(Unit& unit, const Params& p, const TileBlock& block, int four,
                                    TileTokens<kTokens> (&out)[kFour]) {
    constexpr int kRow = TileTokens<kTokens>::kRowBytes;
    constexpr int kPasses = kFour * kTokens * 8 / kThreads;
    EFFINFER_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      const int index = i * kThreads + unit.thread;
      const int piece = index % 8;
      const int token = index / 8 % kTokens;
      const int s = index / (8 * kTokens);
      const bool valid = token < block.num_tokens && four * kFour + s < p.superblocks;
      const int64_t at =
          (block.first_token + token) * p.x.row_bytes + (four * kFour + s) * kRow + piece * 16;
      unit.copy_async(out[s].bytes + token * kRow + (piece ^ (token % 2 * 4)) * 16,
                      p.x.data + (valid ? at : 0), valid);
    }
    unit.commit();
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply_four(Unit& unit, const Unpacked& weights,
                                            const TileTokens<kTokens> (&tokens)[kFour], int count,
                                            float (&sums)[kWarpTiles][4]) {
    const int pair = unit.warp % 2;
    const int tile = unit.warp / 2 * kWarpTiles;
    for (int s = 0; s < count; ++s) {
      EFFINFER_UNROLL
      for (int b = 0; b < 2; ++b) {
        Quad x[kWarpTiles];
        EFFINFER_UNROLL
        for (int i = 0; i < kWarpTiles; ++i) {
          x[i] = tokens[s].fragments(tile + i, b, unit.lane / 4, unit.lane % 4);
        }
        EFFINFER_UNROLL
        for (int j = 0; j < 2; ++j) {
          const Quad a = weights[2 * s + b][j][pair][unit.lane];
          EFFINFER_UNROLL
          for (int i = 0; i < kWarpTiles; ++i) {
            unit.mma(sums[i], a.words, {x[i].words[2 * j], x[i].words[2 * j + 1]});
          }
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
