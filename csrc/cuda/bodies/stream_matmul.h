// y = x W^T for any number of tokens, with bfloat16 activations and packed weights (dequant.h) that
// are read once: what decoding and verification run.
//
// A block has up to 16 warps. Each takes 32 rows ("a unit": two groups of a weight; with GLU one
// group of each of the two, so that gate and up meet in one block) and one slice of k; a unit has
// 16, 8, 4, 2 or 1 slices by its weight's shape alone. Per scale block the products are summed in
// float32 by the tensor cores, which multiply integers and bfloat16 exactly, then scaled and added
// in float32 in the order of k; the slices' sums are added in their order, of 16 first each two.
// One more product is the sum of a block's activations times what its integers are too large, less
// than zero (quant_offset()): other products begin with it, and minima multiply it, which are
// divided by that before.
//
// Tokens go in tiles of 8, the columns of a product. A kernel has 1, 2 or 4 tiles, and each of its
// sums is made by the same operations for all: a token's bits do not depend on how many there are,
// nor on what the others hold. Of more tokens than a kernel takes each so many have blocks of their
// own, next to each other in the grid: all but one find the weights in the L2 cache.
//
// Weights and activations come through shared memory, some places ahead (stream_feed.h).
#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/bodies/dequant.h"
#include "cuda/bodies/stream_bulk_feed.h"
#include "cuda/bodies/stream_lane_feed.h"
#include "cuda/bodies/stream_params.h"
#include "cuda/bodies/stream_scales.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// The sums of a warp: C fragments of a pair of rows (dequant.h) and a tile of tokens. Element i is
// token 2 t + i % 2 of the tile and row 2 pair + i / 2 of the lane.
template <int kTiles>
struct StreamSums {
  float values[kTiles][2][4];
};

// Of a warp and its team.
struct StreamMemory {
  uint8_t* warp;
  uint8_t* tokens;
  uint8_t* team_barriers;
  Team team;
};

// The inner loop, of weights of one format.
template <ops::PackedFormat kFormat, int kTiles>
struct StreamProduct {
  static constexpr PieceLayout kPiece = piece_layout(kFormat);
  static constexpr bool kDense = kFormat.scales == ops::ScaleKind::dense;
  static constexpr int kSteps = kPiece.steps;
  static constexpr int kParts = kPiece.parts();
  static constexpr int kGroupBytes = kPiece.group_bytes;
  static constexpr int kBlockSteps = kFormat.sub_block == 16 ? 1 : 2;  // under one scale
  using Weights = WeightFragments<kFormat>;
  struct NoScales {};
  using Scales = std::conditional_t<kDense, NoScales, StreamScales<kFormat>>;
  using Header = HeaderRow<kFormat>;
  using Factors = HeaderFactors<kFormat>;

  // Adds superblocks [first, last) of two row groups to `sums`, times the tokens. `group` is that
  // of the lane's half of the warp.
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const StreamParams& p, const uint8_t* group,
                                  int64_t header_bytes, const StreamTokens& x, int first, int last,
                                  const StreamMemory& memory, StreamSums<kTiles>& sums) {
    const FeedSource source = {group + header_bytes,
                               {first * kParts, last * kParts, p.feed.hold_bits},
                               p.feed,
                               memory.warp,
                               memory.tokens,
                               memory.team_barriers,
                               memory.team,
                               x};
    if (unit.has_bulk_copies()) {
      run<BulkFeed<kFormat, kTiles>>(unit, p, source, header_bytes, sums);
    } else {
      run<LaneFeed<kFormat>>(unit, p, source, header_bytes, sums);
    }
  }

 private:
  template <class Feed, class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const StreamParams& p, const FeedSource& source,
                                  int64_t header_bytes, StreamSums<kTiles>& sums) {
    using Tokens = typename Feed::Tokens;
    if (source.cut.first >= source.cut.last) return;
    const uint8_t* const header = source.group - header_bytes + unit.lane / 4 % 4 * 8;
    Header next = {};
    next.load(unit, header, p.header_row_bytes, source.cut.first / kParts);
    Feed feed(unit, source, Tokens::place_bytes(p.feed, p.block_tokens));
    Tokens tokens(unit, p, source);
    feed.start_weights(unit, tokens);
    const LaneView view = view_of<Tokens>(unit, feed.group_at(unit.lane), source);
    // Weights come while the kernel before still runs.
    unit.wait_for_inputs();
    feed.start_tokens(unit, tokens);
    const int places = feed.count();
    EFFINFER_NO_UNROLL
    for (int place = 0; place < places; ++place) {
      feed.next(unit, tokens, place);
      const Factors factors(unit, next);
      const int pieces = feed.cut().place(place).count;
      if (place + 1 < places) {
        next.load(unit, header, p.header_row_bytes, feed.cut().place(place + 1).first / kParts);
      }
      const uint8_t* weights = feed.weights;
      const uint8_t* of_tokens = feed.of_tokens;
      EFFINFER_UNROLL_BY(kTiles == 1 ? Feed::kTogether : 1)
      for (int piece = 0; piece < pieces; ++piece) {
        multiply<Tokens>(unit, weights, factors, of_tokens, view, sums);
        weights += kGroupBytes;
        of_tokens += Tokens::kPieceBytes;
      }
      feed.release(unit, tokens, place);
    }
  }

  // What a lane multiplies: where it lies in a place, in bytes, and a row that adds up activations.
  struct LaneView {
    int lines;
    int high;
    int scales;
    int tokens[kTiles];
    uint32_t each[4];
  };

  template <class Tokens, class Unit>
  EFFINFER_DEVICE static LaneView view_of(Unit& unit, int group, const FeedSource& source) {
    constexpr uint32_t kEach = bf16_pair(-quant_offset(kFormat));
    const int g = unit.lane / 4;
    const int t = unit.lane % 4;
    LaneView view;
    view.lines = unit.kept(group + Weights::lines_at(t, g % 4));
    view.high = unit.kept(group + Weights::high_at(g % 4));
    if constexpr (!kDense) view.scales = unit.kept(group + Scales::at(g % 4));
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      if (Tokens::kTileBytes != 0 && tile > 0) {
        view.tokens[tile] = view.tokens[0] + tile * Tokens::kTileBytes;
        continue;
      }
      // In place of a row that is none there is the last one, whose products nobody asks for.
      const int last = Tokens::kTileBytes != 0 ? kTiles * kTileTokens - 1 : source.tokens.count - 1;
      const int token = tile * kTileTokens + g;
      view.tokens[tile] = unit.kept(Tokens::at(source.shape, token < last ? token : last) + t * 8);
    }
    // By shuffles, so that the compiler does not know them: constants it would make for each
    // product.
    const uint32_t own = unit.lane < 4 ? kEach : 0;
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) view.each[i] = unit.shfl(own, i);
    return view;
  }

  template <class Unit>
  EFFINFER_DEVICE static void add_product(Unit& unit, bool first, float (&sum)[4],
                                          const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if (first) {
      unit.mma_first(sum, a, b);
    } else {
      unit.mma(sum, a, b);
    }
  }

  template <class Tokens, class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const uint8_t* group, const Factors& factors,
                                       const uint8_t* of_tokens, const LaneView& view,
                                       StreamSums<kTiles>& sums) {
    Weights weights;
    weights.load(group + view.lines, group + view.high);
    Scales scales;
    if constexpr (!kDense) scales.load(group + view.scales);
    const uint8_t* tokens[kTiles];
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) tokens[tile] = of_tokens + view.tokens[tile];
    EFFINFER_UNROLL
    for (int block = 0; block < kSteps / kBlockSteps; ++block) {
      float scale[4];
      float minimum[4];
      if constexpr (!kDense) {
        EFFINFER_UNROLL
        for (int row = 0; row < 4; ++row) {
          scale[row] = scales.scale(unit, factors, block, row);
          if constexpr (kFormat.has_min) {
            minimum[row] = scales.minimum(unit, factors, block, row);
          }
        }
      }
      multiply_block<Tokens>(unit, weights, block, scale, minimum, tokens, view.each, sums);
    }
  }

  template <class Tokens, class Unit>
  EFFINFER_DEVICE static void multiply_block(Unit& unit, const Weights& weights, int block,
                                             const float (&scale)[4], const float (&minimum)[4],
                                             const uint8_t* const (&tokens)[kTiles],
                                             const uint32_t (&each)[4], StreamSums<kTiles>& sums) {
    constexpr int kParts = Weights::kParts;  // fragments of a weight
    constexpr int kOffset = kDense ? 0 : quant_offset(kFormat);
    const int t = unit.lane % 4;
    uint32_t a[kBlockSteps][2][kParts][4];
    EFFINFER_UNROLL
    for (int s = 0; s < kBlockSteps; ++s) {
      EFFINFER_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        const int step = block * kBlockSteps + s;
        weights.template fragment<0>(unit, step, pair, t, a[s][pair][0]);
        if constexpr (kParts == 2) weights.template fragment<1>(unit, step, pair, t, a[s][pair][1]);
      }
    }
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t b[kBlockSteps][2];
      EFFINFER_UNROLL
      for (int s = 0; s < kBlockSteps; ++s) {
        const uint8_t* from = tokens[tile] + (block * kBlockSteps + s) * Tokens::kStepBytes;
        memcpy(b[s], __builtin_assume_aligned(from, 8), 8);
      }
      float activations[4];
      if constexpr (kOffset != 0) {
        EFFINFER_UNROLL
        for (int s = 0; s < kBlockSteps; ++s) {
          add_product(unit, s == 0, activations, each, b[s]);
        }
      }
      EFFINFER_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        float products[4];
        EFFINFER_UNROLL
        for (int s = 0; s < kBlockSteps; ++s) {
          EFFINFER_UNROLL
          for (int part = 0; part < kParts; ++part) {
            if (kOffset != 0 && s == 0) {
              unit.mma_onto(products, a[s][pair][part], b[s], activations);
            } else {
              add_product(unit, s + part == 0, products, a[s][pair][part], b[s]);
            }
          }
        }
        EFFINFER_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& sum = sums.values[tile][pair][i];
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
  }
};

}  // namespace effinfer::cuda
