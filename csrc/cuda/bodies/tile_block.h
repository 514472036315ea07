// The kernel around the products of tile_matmul.h: its shared memory, and what becomes of the sums.
#pragma once

#include "cuda/bodies/tile_matmul.h"

namespace effinfer::cuda {

// Sums of a warp on their way to the outputs: 32 rows of kTokens tokens. Rows 4 n .. 4 n + 3 of a
// token are at place n ^ token % 8 of its 128 bytes, with their pairs in turn for tokens that have
// 2 in their numbers: what a quarter of a warp stores or loads, or half of it of one pair, then
// meets all banks.
template <int kTokens>
struct TileResults {
  Quad quads[kTokens][8];

  // The C fragments of eight tokens from 8 tile on.
  template <class Unit>
  EFFINFER_DEVICE void store(const Unit& unit, int tile, const float (&of)[2][4]) {
    const int g = unit.lane / 4;
    const int t = unit.lane % 4;
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int token = tile * kTileColumns + 2 * t + i;
      quads[token][g ^ (token % 8)] = turned(token, {{bits_of(of[0][i]), bits_of(of[0][2 + i]),
                                                      bits_of(of[1][i]), bits_of(of[1][2 + i])}});
    }
  }
  // Those of rows 2 g and 2 g + 1 of group `group`.
  template <class Unit>
  EFFINFER_DEVICE void store_rows(const Unit& unit, int tile, int group, const float (&of)[4]) {
    const int g = unit.lane / 4;
    store_pair(tile * kTileColumns + unit.lane % 4 * 2, 4 * group + g / 2, g % 2, of);
  }
  // Those of one pair of rows.
  template <class Unit>
  EFFINFER_DEVICE void store_pair(const Unit& unit, int tile, int pair, const float (&of)[4]) {
    store_pair(tile * kTileColumns + unit.lane % 4 * 2, unit.lane / 4, pair, of);
  }
  EFFINFER_DEVICE Quad at(int token, int n) const {
    const Quad four = quads[token][n ^ (token % 8)];
    return turned(token, four);
  }

 private:
  // A pair of quad n of two tokens.
  EFFINFER_DEVICE void store_pair(int first, int n, int pair, const float (&of)[4]) {
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int token = first + i;
      uint32_t* words = quads[token][n ^ (token % 8)].words + 2 * (pair ^ token / 2 % 2);
      *reinterpret_cast<Pair*>(words) = {{bits_of(of[i]), bits_of(of[2 + i])}};
    }
  }
  EFFINFER_DEVICE static Quad turned(int token, const Quad& four) {
    const auto& [a, b, c, d] = four.words;
    return token / 2 % 2 == 0 ? four : Quad{{c, d, a, b}};
  }
};

// Writes the outputs of tokens [first, first + count) of a unit, of which `results` has the sums:
// with `threads`, a multiple of eight, of which this is number `thread`. Each keeps to its rows, so
// that what these need is loaded once, and residuals of kBatch tokens are on their way together.
template <int kBatch, int kTokens, class Unit>
EFFINFER_DEVICE void finish_tokens(Unit& unit, const TileParams& p, const TilePart& part, int index,
                                   int first, int count, const TileResults<kTokens>& results,
                                   int thread, int threads) {
  const ops::UnaryOp glu = p.glu;
  const bool gated = glu != ops::UnaryOp::none;
  const bool fours = part.fours;
  const MatmulWeight weight = part.weight;
  const OperandOut operand = p.operand;
  const int quads = gated ? 4 : 8;  // of rows
  const int quad = thread % quads;
  const int step = threads / quads;
  const int row = (index * quads + quad) * 4;
  if (row >= weight.rows) return;
  const FourRows rows = four_rows(unit, weight, p.parts[1].weight, glu, row);
  int token = thread / quads;
  if (kBatch > 1 && !gated && fours && rows.count == 4) {
    const FourPlaces places = four_places(weight, operand, row);
    EFFINFER_NO_UNROLL
    for (; token + (kBatch - 1) * step < count; token += kBatch * step) {
      Quad residuals[kBatch];
      Quad sums[kBatch];
      EFFINFER_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        residuals[i] = load_residuals(places, first + token + i * step);
      }
      EFFINFER_UNROLL
      for (int i = 0; i < kBatch; ++i) sums[i] = results.at(token + i * step, quad);
      EFFINFER_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        float values[4];
        activate_four(rows, ops::UnaryOp::none, sums[i], sums[i], values);
        store_four(unit, places, first + token + i * step, values, residuals[i]);
      }
    }
  }
  EFFINFER_NO_UNROLL
  for (; token < count; token += step) {
    const Quad sums = results.at(token, quad);
    const Quad seconds = results.at(token, gated ? quads + quad : quad);
    finish_four(unit, weight, rows, glu, operand, fours, first + token, sums, seconds);
  }
}

template <ops::PackedFormat kFormat, int kTiles>
struct TileMatmul {
  static constexpr const char* kName = "tile_matmul";
  static constexpr int kReplacedOn = 90;  // by wgmma_matmul.h
  static constexpr int kThreads = kTileWarps * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr int kTokens = kTiles * kTileColumns;
  using Product = TileProduct<kFormat, kTiles>;
  using Copies = Product::Copies;
  static constexpr int kResultTokens = kTokens / 2;
  using Params = TileParams;
  struct Shared {
    union {
      Product::Ring ring;
      TileResults<kResultTokens> results[kTileWarps];
    };
    TileBlock block;  // needed before the products and after them: sums take the registers
  };

  // Of the host.
  static TileX x_of(const ops::Operand& operand) { return Copies::x_of(operand); }

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    TileSums<kTiles> sums = {};
    multiply(unit, p, shared, sums);
    unit.sync();  // all have read the ring
    const TileBlock block = shared.block;
    const TilePart& part = p.parts[block.part];
    const int index = block.first_unit + unit.warp;
    if (index < part.units) finish(unit, p, block, index, sums, shared.results[unit.warp]);
    if (block.first_unit + kTileWarps >= part.units) {
      pad_operand(unit, p.operand, part.weight.rows, block.first_token,
                  block.first_token + block.num_tokens, unit.thread, kThreads);
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, Shared& shared,
                                       TileSums<kTiles>& sums) {
    const TileBlock block = tile_block<kTileWarps, kTokens>(p, unit.block);
    if (unit.thread == 0) shared.block = block;
    Copies copies(unit.thread, p.x, block.first_token, block.num_tokens);
    const uint8_t* group =
        tile_group(p, p.parts[block.part], block.first_unit + unit.warp, unit.lane);
    Product::run(unit, p, group, copies, shared.ring, sums);
  }

  // The ring has room for the sums of half the tokens.
  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const Params& p, const TileBlock& block, int index,
                                     const TileSums<kTiles>& sums,
                                     TileResults<kResultTokens>& results) {
    EFFINFER_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (half > 0) unit.sync_warp();  // all have read the first half
      EFFINFER_UNROLL
      for (int tile = 0; tile < kTiles / 2; ++tile) {
        results.store(unit, tile, sums.values[half * (kTiles / 2) + tile]);
      }
      unit.sync_warp();
      const int first = half * kResultTokens;
      const int left = block.num_tokens - first;
      finish_tokens<1>(unit, p, p.parts[block.part], index, block.first_token + first,
                       left < kResultTokens ? left : kResultTokens, results, unit.lane, kWarp);
    }
  }
};

}  // namespace effinfer::cuda
