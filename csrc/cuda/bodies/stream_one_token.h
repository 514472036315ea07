// What a lane of stream_matmul.h multiplies of one token. All columns of a product are that token,
// so that the four lanes with the same rows have all of their products, and each of them scales and
// adds those of one row: a quarter of the scales and an eighth of the additions of stream_tiles.h,
// by the same operations.
#pragma once

#include <cmath>

#include "cuda/bodies/stream_feed.h"
#include "cuda/bodies/stream_params.h"
#include "cuda/bodies/stream_products.h"
#include "cuda/bodies/stream_scales.h"

namespace effinfer::cuda {

// Of row `lane` of the warp.
struct OneTokenSum {
  float value;

  template <class Unit>
  EFFINFER_DEVICE void store(const Unit& unit, int, StreamRow* to) const {
    to[0][unit.lane] = value;
  }
};

template <ops::PackedFormat kFormat, class Tokens>
class OneTokenMultiplier {
  static_assert(kFormat.scales != ops::ScaleKind::dense);  // it has nothing to scale

 public:
  using Sums = OneTokenSum;
  using Header = HeaderRow<kFormat, 1>;
  using Factors = HeaderFactors<kFormat, 1>;

  template <class Unit>
  EFFINFER_DEVICE OneTokenMultiplier(Unit& unit, int group, const FeedSource&)
      : places_(unit, group), token_(unit.kept(unit.lane % 4 * 8)), ones_(unit) {}

  // Adds a superblock, of which weights and token lie in a place.
  template <class Unit>
  EFFINFER_DEVICE void add(Unit& unit, const uint8_t* group, const Factors& factors,
                           const uint8_t* of_token, Sums& sum) const {
    const auto piece = places_.load(group);
    const uint8_t* const token = of_token + token_;
    EFFINFER_UNROLL
    for (int block = 0; block < piece_layout(kFormat).steps / Products::kSteps; ++block) {
      const Products of(unit, piece.weights, block);
      uint32_t b[Products::kSteps][2];
      EFFINFER_UNROLL
      for (int s = 0; s < Products::kSteps; ++s) {
        load_step(token + (block * Products::kSteps + s) * Tokens::kStepBytes, b[s]);
      }
      float activations[4];
      Products::add_up(unit, ones_, b, activations);
      float products[2][4];
      EFFINFER_UNROLL
      for (int pair = 0; pair < 2; ++pair) of.multiply(unit, pair, b, activations, products[pair]);
      sum.value =
          fmaf(piece.scales.scale(unit, factors, block, 0), own(unit.lane, products), sum.value);
      if constexpr (kFormat.has_min) {
        sum.value = fmaf(piece.scales.minimum(unit, factors, block, 0), activations[0], sum.value);
      }
    }
  }

 private:
  using Products = BlockProducts<kFormat>;

  // That of row t of the lane's four.
  EFFINFER_DEVICE static float own(int lane, const float (&products)[2][4]) {
    const float (&second)[4] = products[1];
    const float (&first)[4] = products[0];
    const float even = (lane & 2) != 0 ? second[0] : first[0];
    const float odd = (lane & 2) != 0 ? second[2] : first[2];
    return (lane & 1) != 0 ? odd : even;
  }

  LanePlaces<kFormat, 1> places_;
  int token_;  // of its numbers in a place, in bytes
  OffsetRow<kFormat> ones_;
};

}  // namespace effinfer::cuda
