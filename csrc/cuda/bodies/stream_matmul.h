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
// Tokens go in tiles of 8, the columns of a product (stream_tiles.h). A kernel has 1, 2 or 4 tiles,
// or one token (stream_one_token.h), and each of its sums is made by the same operations for all:
// a token's bits do not depend on how many there are, nor on what the others hold. Of more tokens
// than a kernel takes each so many have blocks of their own, next to each other in the grid: all
// but one find the weights in the L2 cache.
//
// Weights and activations come through shared memory, some places ahead (stream_feed.h).
#pragma once

#include <type_traits>

#include "cuda/bodies/dequant.h"
#include "cuda/bodies/stream_bulk_feed.h"
#include "cuda/bodies/stream_lane_feed.h"
#include "cuda/bodies/stream_one_token.h"
#include "cuda/bodies/stream_params.h"
#include "cuda/bodies/stream_tiles.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// Of a warp and its team.
struct StreamMemory {
  uint8_t* warp;
  uint8_t* tokens;
  uint8_t* team_barriers;
  Team team;
};

// Of a warp that has two slices in a row: with which of its places the second one begins, and where
// the sums of the first one go.
struct SliceEnd {
  int place = -1;
  StreamRow* sums = nullptr;
};

// The inner loop, of weights of one format and up to so many tokens.
template <ops::PackedFormat kFormat, int kTokens>
struct StreamProduct {
  static constexpr int kTiles = tiles_of(kTokens);
  static constexpr int kParts = piece_layout(kFormat).parts();
  static constexpr int kGroupBytes = piece_layout(kFormat).group_bytes;
  template <class Tokens>
  using Multiplier = std::conditional_t<kTokens == 1, OneTokenMultiplier<kFormat, Tokens>,
                                        TileMultiplier<kFormat, Tokens, kTiles>>;
  using Sums = std::conditional_t<kTokens == 1, OneTokenSum,
                                  StreamSums<piece_layout(kFormat).steps, kTiles>>;

  // Adds superblocks [first, last) of two row groups to `sums`, times the tokens.
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const StreamParams& p, const RowGroups& groups,
                                  int64_t header_bytes, const StreamTokens& x, int first, int last,
                                  const StreamMemory& memory, Sums& sums,
                                  const SliceEnd& end = {}) {
    const FeedSource source = {{groups.first + header_bytes, groups.second},
                               {first * kParts, last * kParts, p.feed.hold_bits},
                               p.feed,
                               memory.warp,
                               memory.tokens,
                               memory.team_barriers,
                               memory.team,
                               x};
    if (unit.has_bulk_copies()) {
      run<BulkFeed<kFormat, kTiles>>(unit, p, source, header_bytes, sums, end);
    } else {
      run<LaneFeed<kFormat>>(unit, p, source, header_bytes, sums, end);
    }
  }

 private:
  template <class Feed, class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const StreamParams& p, const FeedSource& source,
                                  int64_t header_bytes, Sums& sums, const SliceEnd& end) {
    using Tokens = typename Feed::Tokens;
    using Header = typename Multiplier<Tokens>::Header;
    if (source.cut.first >= source.cut.last) return;
    const uint8_t* const header =
        source.groups.of(unit.lane) - header_bytes + Header::at(unit.lane);
    Header next = {};
    next.load(unit, header, p.header_row_bytes, source.cut.first / kParts);
    Feed feed(unit, source, Tokens::place_bytes(p.feed, p.block_tokens));
    Tokens tokens(unit, p, source);
    feed.start_weights(unit, tokens);
    const Multiplier<Tokens> multiplier(unit, feed.group_at(unit.lane), source);
    if constexpr (kTiles == 1) {
      prefetch_next(unit, p.next, (unit.block << p.slot_bits) + unit.warp);
    }
    // Weights come while the kernel before still runs.
    unit.wait_for_inputs();
    feed.start_tokens(unit, tokens);
    const int places = feed.count();
    EFFINFER_NO_UNROLL
    for (int place = 0; place < places; ++place) {
      feed.next(unit, tokens, place);
      if (kTokens == 1 && place == end.place) {
        sums.store(unit, kTokens, end.sums);
        sums = {};
      }
      const typename Multiplier<Tokens>::Factors factors(unit, next);
      const int pieces = feed.cut().place(place).count;
      if (place + 1 < places) {
        next.load(unit, header, p.header_row_bytes, feed.cut().place(place + 1).first / kParts);
      }
      const uint8_t* weights = feed.weights;
      const uint8_t* of_tokens = feed.of_tokens;
      EFFINFER_UNROLL_BY(kTiles == 1 ? Feed::kTogether : 1)
      for (int piece = 0; piece < pieces; ++piece) {
        multiplier.add(unit, weights, factors, of_tokens, sums);
        weights += kGroupBytes;
        of_tokens += Tokens::kPieceBytes;
      }
      feed.release(unit, tokens, place);
    }
  }
};

}  // namespace effinfer::cuda
