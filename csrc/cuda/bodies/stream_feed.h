// How weights and activations come to a warp of stream_matmul.h: through shared memory. A warp
// multiplies a *piece* at a time: a superblock of its 32 rows, of dense weights half of one. What
// comes at once is a *place*: one, two or four pieces, as the launch says. A warp's own memory, in
// bytes from the first:
//
//   barriers   an Mbarrier for each place, where the GPU has them; of the first warps those of the
//              teams follow
//   weights    [place][half of the lanes][piece] the bytes of a row group, as they lie in memory: k
//              goes on, so that what comes is one run of bytes
//
// and of the block's warps with the same slice of k, which are a *team*, the activations of as many
// tokens as the block has:
//
//   rows       [place][token][k] as they lie in memory. A row has 32 bytes more than the place's k,
//              so that the 32 lanes' reads of 8 bytes, of 8 tokens each, meet all banks evenly
//   boxes      [place][piece][token][k] rows of 128 bytes, of dense weights' pieces of 64, swizzled
//              as tensor maps do; on Hopper, of more than 8 tokens
//
// Who copies: on Hopper a lane asks for what a place has of a row group or of a token's row, or for
// a piece's box, with one copy, and nobody spends instructions on more addresses. Elsewhere lanes
// copy 16 bytes each, in groups of copies that are counted. (Loads into registers would be waited
// for together: a warp has six counters for them, and ptxas gives all pieces under way the same
// one.)
#pragma once

#include <cstdint>

#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

inline constexpr int kTileTokens = 8;  // columns of a product
constexpr int tiles_of(int tokens) {
  return (tokens + kTileTokens - 1) / kTileTokens;
}
inline constexpr int kMostPlaces = 5;

// What is on its way at a time: `places`, of which one is multiplied, of 2^hold_bits pieces each.
struct FeedShape {
  int32_t places = 0;
  int32_t hold_bits = 0;

  EFFINFER_DEVICE constexpr int hold() const { return 1 << hold_bits; }
};

// The warps of a block that multiply the same k with tokens that they share.
struct Team {
  int rank;
  int size;
  int id;  // of its barrier

  EFFINFER_DEVICE bool is_one() const { return size == 1; }

  // All have read what is copied over from now on, and all copies that were waited for are there.
  template <class Unit>
  EFFINFER_DEVICE void sync(Unit& unit) const {
    if (is_one()) {
      unit.sync_warp();
    } else {
      unit.sync_some(id, size * kWarp);
    }
  }
};

// Activations of a block.
struct StreamTokens {
  int first;
  int count;
  const TensorMap* map;  // of boxes, where they come so
};

// Of pieces with `kSteps` steps of 16 k: where the numbers of tokens lie in a place.
template <int kSteps>
struct TokenRows {
  static constexpr int kStepBytes = 32;
  static constexpr int kPieceBytes = kSteps * kStepBytes;

  EFFINFER_DEVICE static constexpr int row_bytes(const FeedShape& shape) {
    return (kPieceBytes << shape.hold_bits) + 32;
  }
  EFFINFER_DEVICE static constexpr int place_bytes(const FeedShape& shape, int tokens) {
    return tokens * row_bytes(shape);
  }
  EFFINFER_DEVICE static int at(const FeedShape& shape, int token) {
    return token * row_bytes(shape);
  }

  // Those that a lane reads: of each tile the token of its column.
  template <int kTiles>
  class Lane {
   public:
    // In place of a row that is none there is the last one, whose products nobody asks for.
    template <class Unit>
    EFFINFER_DEVICE Lane(Unit& unit, const FeedShape& shape, int tokens) {
      EFFINFER_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        const int token = tile * kTileTokens + unit.lane / 4;
        tiles_[tile] = unit.kept(TokenRows::at(shape, token < tokens ? token : tokens - 1) +
                                 unit.lane % 4 * 8);
      }
    }
    EFFINFER_DEVICE int at(int tile, int step) const { return tiles_[tile] + step * kStepBytes; }

   private:
    int tiles_[kTiles];
  };
};

constexpr Swizzle box_swizzle(int steps) {
  return steps == 4 ? Swizzle::bytes128 : Swizzle::bytes64;
}

// A box is a piece of all tokens. Its 16 bytes are swizzled among the rows that share banks, so
// that a half of the lanes meets all banks if its tokens are the right four of a tile: a product's
// columns are tokens in another order.
template <int kSteps, int kTiles>
struct TokenBoxes {
  static constexpr int kRowBytes = kSteps * 32;
  static constexpr int kTileBytes = kTileTokens * kRowBytes;
  static constexpr int kPieceBytes = kTiles * kTileBytes;
  static_assert(kSteps == 4 || kSteps == 2);

  EFFINFER_DEVICE static constexpr int place_bytes(const FeedShape& shape, int) {
    return kPieceBytes << shape.hold_bits;
  }
  // Of a tile. Columns 0 to 3 are tokens whose rows are swizzled differently or lie at other banks.
  EFFINFER_DEVICE static constexpr int token_of(int column) {
    return kSteps == 4 ? column % 4 * 2 + column / 4
                       : column % 2 + column / 2 % 2 * 4 + column / 4 * 2;
  }

  template <int>
  class Lane {
   public:
    template <class Unit>
    EFFINFER_DEVICE Lane(Unit& unit, const FeedShape&, int) {
      const int token = token_of(unit.lane / 4);
      const int swizzled = kSteps == 4 ? token : token / 2;
      const int first = unit.lane % 4 / 2 ^ swizzled;  // of 16 bytes
      EFFINFER_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        steps_[step] = unit.kept(token * kRowBytes + (first ^ 2 * step) * 16 + unit.lane % 2 * 8);
      }
    }
    EFFINFER_DEVICE int at(int tile, int step) const { return steps_[step] + tile * kTileBytes; }

   private:
    int steps_[kSteps];
  };
};

// Of pieces of a format.
struct PieceLayout {
  int steps;        // of 16 k
  int group_bytes;  // of half of its rows

  constexpr int parts() const { return 4 / steps; }  // pieces of a superblock
};

constexpr PieceLayout piece_layout(const ops::PackedFormat& format) {
  const int steps = format.scales == ops::ScaleKind::dense ? 2 : 4;
  return {steps, static_cast<int>(ops::superblock_bytes(format) * steps / 4)};
}

// A warp's, and behind them a team's.
inline constexpr int kBarrierBytes = 64;
inline constexpr int kTeamBarriers = kBarrierBytes / 2;

constexpr int feed_bytes(const PieceLayout& piece, const FeedShape& shape) {
  return kBarrierBytes + shape.places * shape.hold() * 2 * piece.group_bytes;
}

// Pieces [first, first + count) of a row group.
struct PieceRun {
  int first;
  int count;
};

// Where pieces [first, last) of a row group are cut into places, none of which is under two rows of
// a header.
struct PieceCut {
  int first;
  int last;
  int hold_bits;

  EFFINFER_DEVICE int places() const {
    return ((last - 1) >> hold_bits) - (first >> hold_bits) + 1;
  }
  EFFINFER_DEVICE PieceRun place(int index) const {
    const int even = ((first >> hold_bits) + index) << hold_bits;
    const int begin = even > first ? even : first;
    const int end = even + (1 << hold_bits);
    return {begin, (end < last ? end : last) - begin};
  }
};

// The two of a warp, one for each half of its lanes.
struct RowGroups {
  const uint8_t* first;
  int64_t second;  // behind it, in bytes; 0: is none, so that the first one comes twice

  EFFINFER_DEVICE const uint8_t* of(int lane) const { return first + (lane < 16 ? 0 : second); }
};

// What both feeds are made with: row groups, from their first superblocks on, pieces of k, and the
// memory of the warp and of its team.
struct FeedSource {
  RowGroups groups;
  PieceCut cut;
  FeedShape shape;
  uint8_t* memory;
  uint8_t* team_memory;
  uint8_t* team_barriers;
  Team team;
  StreamTokens tokens;
};

// What feeds have in common: what lies where. All of it is kept in registers: the compiler would
// otherwise compute it from the launch's parameters for each place.
template <ops::PackedFormat kFormat>
class Feed {
 public:
  static constexpr PieceLayout kPiece = piece_layout(kFormat);
  static constexpr int kGroupBytes = kPiece.group_bytes;

  // In the place.
  const uint8_t* weights = nullptr;
  const uint8_t* of_tokens = nullptr;

  EFFINFER_DEVICE const PieceCut& cut() const { return cut_; }
  // From the first group's weights to those of the lane's.
  EFFINFER_DEVICE int group_at(int lane) const { return lane / 16 * half_bytes_; }

 protected:
  template <class Unit>
  EFFINFER_DEVICE Feed(Unit& unit, const FeedSource& source, int token_place)
      : memory_(unit.kept_shared(source.memory)),
        team_memory_(unit.kept_shared(source.team_memory)),
        cut_{unit.kept(source.cut.first), unit.kept(source.cut.last), source.cut.hold_bits},
        half_bytes_(unit.kept(kGroupBytes << source.shape.hold_bits)),
        token_place_(unit.kept(token_place)) {}

  EFFINFER_DEVICE uint8_t* weights_in(int place, int half) const {
    return memory_ + kBarrierBytes + (place * 2 + half) * half_bytes_;
  }
  EFFINFER_DEVICE uint8_t* tokens_in(int place) const {
    return team_memory_ + place * token_place_;
  }
  uint8_t* const memory_;
  uint8_t* const team_memory_;
  const PieceCut cut_;
  const int half_bytes_;
  const int token_place_;  // bytes
};

}  // namespace effinfer::cuda
