// The sums of tile_matmul.h for few tokens or few rows, with the same bits: what a short prompt,
// the end of one, and small matrices run.
//
// A sum is one chain of products over all of k, which cannot be cut into slices, so what is left to
// share is the unpacking. A block has one unit, 32 rows, and goes on by 128 k, four blocks of 32.
// Four of its warps unpack one block each and leave the fragments in shared memory, while the
// others multiply those of the 128 k before: each one pair of rows with one tile of tokens (64
// tokens: with two, a fragment of weights read from shared memory then serves twice).
//
// The chain bounds it, with 16 tokens or fewer: 128 k are 8 products that wait for each other, some
// 33 cycles each, while a warp that unpacks issues 100 to 200 instructions. Weights come by
// asynchronous copies some times 128 k ahead.
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
  static_assert(kMultiplyWarps % kBlocks == 0);
  using Params = TileParams;
  using Weights = TileWeights<kFormat>;
  using Of = PlaceOf<kFormat>;
  static constexpr bool kDense = kFormat.scales == ops::ScaleKind::dense;
  static constexpr int kCopied = kBlocks * 2 / Of::kSteps;  // places of 128 k
  // Two blocks of a multiprocessor with 100 KB of shared memory have room for as many.
  static constexpr int kPlaces = kDense ? 3 : 4;
  static constexpr int kStages = kDense && kTiles < 4 ? 2 : 3;
  using Copies = WeightCopies<kFormat, TilePieces<kFormat.bits>, kCopied>;

  // Fragments: [block][step][pair][lane].
  using Unpacked = Quad[kBlocks][2][2][kWarp];
  struct Shared {
    Unpacked weights[2];
    union {
      struct {
        TileTokens<kTokens> tokens[kStages][kTwo];
        alignas(128) uint8_t places[kPlaces][kCopied][Of::kWeightBytes];
      };
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
    unit.sync();  // all have read the activations
    if (unit.warp < kMultiplyWarps) store(unit, sums, shared.results);
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
  // A warp either multiplies or unpacks, and copies what it does that with.
  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, const TileBlock& block,
                                       Shared& shared, float (&sums)[kWarpTiles][4]) {
    const bool multiplies = unit.warp < kMultiplyWarps;
    const int b = unit.warp % kBlocks;  // that it unpacks
    const int superblocks = p.superblocks;
    const int twos = (superblocks + kTwo - 1) / kTwo;
    Copies copies(tile_group(p, p.parts[block.part], block.first_unit, unit.lane), p.header_bytes,
                  p.header_row_bytes, unit.lane, b);
    const auto fetch_weights = [&](int two, int place) {
      const bool exists = two * kCopied + b < superblocks * kCopied / kTwo;
      if (b < kCopied) copies.fetch(unit, shared.places[place][b], exists);
      unit.commit();
    };
    if (multiplies) {
      EFFINFER_UNROLL
      for (int i = 0; i < kStages - 1; ++i) fetch(unit, p, block, i, shared.tokens[i]);
    } else {
      EFFINFER_UNROLL
      for (int i = 0; i < kPlaces; ++i) fetch_weights(i, i);
      unit.template wait<kPlaces - 1>();
    }
    unit.sync();  // the first weights are there for all
    if (!multiplies) unpack(unit, b, shared.places[0], shared.weights[0]);
    int stage = 0;
    int place = 0;
    EFFINFER_NO_UNROLL
    for (int two = 0; two < twos; ++two) {
      if (multiplies) {
        unit.template wait<kStages - 2>();
      } else {
        unit.template wait<kPlaces - 2>();
      }
      unit.sync();  // all is there, and all have read what is replaced now
      if (multiplies) {
        fetch(unit, p, block, two + kStages - 1,
              shared.tokens[stage == 0 ? kStages - 1 : stage - 1]);
        const int left = superblocks - two * kTwo;
        multiply_two(unit, shared.weights[two % 2], shared.tokens[stage], left, sums);
      } else {
        fetch_weights(two + kPlaces, place);
        const int next = place + 1 == kPlaces ? 0 : place + 1;
        unpack(unit, b, shared.places[next], shared.weights[(two + 1) % 2]);
        place = next;
      }
      if (++stage == kStages) stage = 0;
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void unpack(Unit& unit, int b,
                                     const uint8_t (&places)[kCopied][Of::kWeightBytes],
                                     Unpacked& out) {
    const auto of = [&](int of_place) {
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
    };
    of(kDense ? 0 : b % 2);
  }

  // Puts the activations of 128 k on their way.
  template <class Unit>
  EFFINFER_DEVICE static void fetch(Unit& unit, const Params& p, const TileBlock& block, int two,
                                    TileTokens<kTokens> (&out)[kTwo]) {
    constexpr int kRow = TileTokens<kTokens>::kRowBytes;
    constexpr int kCopying = kMultiplyWarps * kWarp;
    constexpr int kPasses = kTwo * kTokens * 8 / kCopying;
    EFFINFER_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      const int index = i * kCopying + unit.thread;
      const int piece = index % 8;
      const int token = index / 8 % kTokens;
      const int s = i * kCopying / (8 * kTokens);
      const bool valid = token < block.num_tokens;
      const int64_t at =
          (block.first_token + token) * p.x.row_bytes + (two * kTwo + s) * kRow + piece * 16;
      if (two * kTwo + s < p.superblocks) {
        unit.copy_async(out[s].bytes + token * kRow + (piece ^ (token % 2 * 4)) * 16,
                        p.x.data + (valid ? at : 0), valid);
      }
    }
    unit.commit();
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply_two(Unit& unit, const Unpacked& weights,
                                           const TileTokens<kTokens> (&tokens)[kTwo], int left,
                                           float (&sums)[kWarpTiles][4]) {
    const int pair = unit.warp % 2;
    const int tile = unit.warp / 2 * kWarpTiles;
    EFFINFER_UNROLL
    for (int s = 0; s < kTwo; ++s) {
      if (s >= left) break;
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
