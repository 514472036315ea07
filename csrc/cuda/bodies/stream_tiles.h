// What a lane of stream_matmul.h multiplies of tiles of 8 tokens, the columns of a product: four
// rows of two tokens of each.
#pragma once

#include <cmath>

#include "cuda/bodies/stream_feed.h"
#include "cuda/bodies/stream_params.h"
#include "cuda/bodies/stream_products.h"
#include "cuda/bodies/stream_scales.h"

namespace effinfer::cuda {

// C fragments of a pair of rows (dequant.h) and a tile. Element i is column 2 t + i % 2 of the tile
// and row 2 pair + i / 2 of the lane.
template <int kSteps, int kTiles>
struct StreamSums {
  float values[kTiles][2][4];

  // Those of the first tokens to shared memory.
  template <class Unit>
  EFFINFER_DEVICE void store(const Unit& unit, int tokens, StreamRow* to) const {
    const int g = unit.lane / 4;
    const int t = unit.lane % 4;
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      EFFINFER_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float (&of)[2][4] = values[tile];
        const Quad four = {
            {bits_of(of[0][i]), bits_of(of[0][2 + i]), bits_of(of[1][i]), bits_of(of[1][2 + i])}};
        const int token = tile * kTileTokens + token_of(unit, 2 * t + i);
        if (token < tokens) *reinterpret_cast<Quad*>(&to[token][4 * g]) = four;
      }
    }
  }

 private:
  // Of a tile: tokens that come in boxes have another order.
  template <class Unit>
  EFFINFER_DEVICE static int token_of(const Unit& unit, int column) {
    const bool in_boxes = kTiles > 1 && unit.has_bulk_copies();
    return in_boxes ? TokenBoxes<kSteps, kTiles>::token_of(column) : column;
  }
};

template <ops::PackedFormat kFormat, class Tokens, int kTiles>
class TileMultiplier {
 public:
  using Sums = StreamSums<piece_layout(kFormat).steps, kTiles>;
  using Header = HeaderRow<kFormat, 4>;
  using Factors = HeaderFactors<kFormat, 4>;

  template <class Unit>
  EFFINFER_DEVICE TileMultiplier(Unit& unit, int group, const FeedSource& source)
      : places_(unit, group), tokens_(unit, source.shape, source.tokens.count), ones_(unit) {}

  // Adds a piece, of which weights and tokens lie in a place.
  template <class Unit>
  EFFINFER_DEVICE void add(Unit& unit, const uint8_t* group, const Factors& factors,
                           const uint8_t* of_tokens, Sums& sums) const {
    const auto piece = places_.load(group);
    EFFINFER_UNROLL
    for (int block = 0; block < kPiece.steps / Products::kSteps; ++block) {
      float scale[4];
      float minimum[4];
      if constexpr (!kDense) {
        EFFINFER_UNROLL
        for (int row = 0; row < 4; ++row) {
          scale[row] = piece.scales.scale(unit, factors, block, row);
          if constexpr (kFormat.has_min) {
            minimum[row] = piece.scales.minimum(unit, factors, block, row);
          }
        }
      }
      const Products products(unit, piece.weights, block);
      EFFINFER_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t b[Products::kSteps][2];
        EFFINFER_UNROLL
        for (int s = 0; s < Products::kSteps; ++s) {
          load_step(of_tokens + tokens_.at(tile, block * Products::kSteps + s), b[s]);
        }
        add_block(unit, products, scale, minimum, b, sums.values[tile]);
      }
    }
  }

 private:
  static constexpr PieceLayout kPiece = piece_layout(kFormat);
  static constexpr bool kDense = kFormat.scales == ops::ScaleKind::dense;
  using Products = BlockProducts<kFormat>;

  template <class Unit>
  EFFINFER_DEVICE void add_block(Unit& unit, const Products& of, const float (&scale)[4],
                                 const float (&minimum)[4],
                                 const uint32_t (&b)[Products::kSteps][2],
                                 float (&sums)[2][4]) const {
    float activations[4];
    Products::add_up(unit, ones_, b, activations);
    EFFINFER_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      float products[4];
      of.multiply(unit, pair, b, activations, products);
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& sum = sums[pair][i];
        if constexpr (kDense) {
          sum += products[i];
        } else {
          sum = fmaf(scale[2 * pair + i / 2], products[i], sum);
          if constexpr (kFormat.has_min) {
            sum = fmaf(minimum[2 * pair + i / 2], activations[i % 2], sum);
          }
        }
      }
    }
  }

  LanePlaces<kFormat, 4> places_;
  typename Tokens::template Lane<kTiles> tokens_;
  OffsetRow<kFormat> ones_;
};

}  // namespace effinfer::cuda
