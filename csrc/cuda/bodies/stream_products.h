// What stream_matmul.h does whatever the tokens: a lane's share of a piece, and for a block of k
// under one scale integers times activations, exactly, with float32 sums by the tensor cores.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/bodies/dequant.h"
#include "cuda/bodies/stream_scales.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// A lane's weights of a piece, and the scales of so many of its rows.
template <ops::PackedFormat kFormat, int kRows>
struct LanePiece {
  struct NoScales {};
  using Weights = WeightFragments<kFormat>;
  using Scales = std::conditional_t<kFormat.scales == ops::ScaleKind::dense, NoScales,
                                    StreamScales<kFormat, kRows>>;
  Weights weights;
  Scales scales;
};

// Where they lie in a place, in bytes; `group` is where the row group of the lane's half lies.
template <ops::PackedFormat kFormat, int kRows>
class LanePlaces {
 public:
  using Piece = LanePiece<kFormat, kRows>;

  template <class Unit>
  EFFINFER_DEVICE LanePlaces(Unit& unit, int group) {
    const int quad = unit.lane / 4 % 4;
    lines_ = unit.kept(group + Piece::Weights::lines_at(unit.lane % 4, quad));
    high_ = unit.kept(group + Piece::Weights::high_at(quad));
    if constexpr (kHasScales) scales_ = unit.kept(group + Piece::Scales::at(unit.lane));
  }

  EFFINFER_DEVICE Piece load(const uint8_t* place) const {
    Piece piece;
    piece.weights.load(place + lines_, place + high_);
    if constexpr (kHasScales) piece.scales.load(place + scales_);
    return piece;
  }

 private:
  static constexpr bool kHasScales = kFormat.scales != ops::ScaleKind::dense;

  int lines_;
  int high_;
  int scales_;
};

// A row of ones, less than zero and as large as quant_offset(): its product is what others begin
// with.
template <ops::PackedFormat kFormat>
struct OffsetRow {
  template <class Unit>
  EFFINFER_DEVICE explicit OffsetRow(Unit& unit) {
    constexpr uint32_t kEach = bf16_pair(-quant_offset(kFormat));
    // By shuffles, so that the compiler does not know them: constants it would make for each
    // product.
    const uint32_t own = unit.lane < 4 ? kEach : 0;
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) fragment[i] = unit.shfl(own, i);
  }
  uint32_t fragment[4];
};

// A lane's numbers of a tile's tokens in a step of k: a B fragment.
EFFINFER_DEVICE void load_step(const uint8_t* from, uint32_t (&b)[2]) {
  memcpy(b, __builtin_assume_aligned(from, 8), 8);
}

// The block's fragments of the lane's four rows.
template <ops::PackedFormat kFormat>
class BlockProducts {
 public:
  using Weights = WeightFragments<kFormat>;
  static constexpr int kSteps = kFormat.sub_block == 16 ? 1 : 2;  // of 16 k
  static constexpr bool kDense = kFormat.scales == ops::ScaleKind::dense;
  static constexpr int kOffset = kDense ? 0 : quant_offset(kFormat);

  template <class Unit>
  EFFINFER_DEVICE BlockProducts(Unit& unit, const Weights& weights, int block) {
    const int t = unit.lane % 4;
    EFFINFER_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      EFFINFER_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        const int step = block * kSteps + s;
        weights.template fragment<0>(unit, step, pair, t, a_[s][pair][0]);
        if constexpr (kParts == 2) {
          weights.template fragment<1>(unit, step, pair, t, a_[s][pair][1]);
        }
      }
    }
  }

  // The sum of their activations times what integers are too large, less than zero.
  template <class Unit>
  EFFINFER_DEVICE static void add_up(Unit& unit, const OffsetRow<kFormat>& ones,
                                     const uint32_t (&b)[kSteps][2], float (&activations)[4]) {
    if constexpr (kOffset != 0) {
      EFFINFER_UNROLL
      for (int s = 0; s < kSteps; ++s) add(unit, s == 0, activations, ones.fragment, b[s]);
    }
  }

  // Of the two rows of a pair.
  template <class Unit>
  EFFINFER_DEVICE void multiply(Unit& unit, int pair, const uint32_t (&b)[kSteps][2],
                                const float (&activations)[4], float (&products)[4]) const {
    EFFINFER_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      EFFINFER_UNROLL
      for (int part = 0; part < kParts; ++part) {
        if (kOffset != 0 && s == 0) {
          unit.mma_onto(products, a_[s][pair][part], b[s], activations);
        } else {
          add(unit, s + part == 0, products, a_[s][pair][part], b[s]);
        }
      }
    }
  }

 private:
  static constexpr int kParts = Weights::kParts;  // fragments of a weight

  template <class Unit>
  EFFINFER_DEVICE static void add(Unit& unit, bool first, float (&sum)[4], const uint32_t (&a)[4],
                                  const uint32_t (&b)[2]) {
    if (first) {
      unit.mma_first(sum, a, b);
    } else {
      unit.mma(sum, a, b);
    }
  }

  uint32_t a_[kSteps][2][kParts][4];
};

}  // namespace effinfer::cuda
