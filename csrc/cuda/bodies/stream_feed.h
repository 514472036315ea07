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
//   boxes      [place][step of 16 k][token][16 k] 8 tokens of a step are 256 bytes that 32 lanes
//              read; on Hopper, of more than 8 tokens
//
// Who copies: on Hopper a lane asks for what a place has of a row group, of a token's row or of a
// step's box with one copy, and nobody spends instructions on more addresses. Elsewhere lanes copy
// 16 bytes each, in groups of copies that are counted. (Loads into registers would be waited for
// together: a warp has six counters for them, and ptxas gives all pieces under way the same one.)
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
};

// Of pieces with `kSteps` steps of 16 k: where the numbers of a token lie in a place. Tiles are
// kTileBytes apart, or where that is 0 have addresses of their own.
template <int kSteps>
struct TokenRows {
  static constexpr int kStepBytes = 32;
  static constexpr int kPieceBytes = kSteps * kStepBytes;
  static constexpr int kTileBytes = 0;

  EFFINFER_DEVICE static constexpr int row_bytes(const FeedShape& shape) {
    return (kPieceBytes << shape.hold_bits) + 32;
  }
  EFFINFER_DEVICE static constexpr int place_bytes(const FeedShape& shape, int tokens) {
    return tokens * row_bytes(shape);
  }
  EFFINFER_DEVICE static int at(const FeedShape& shape, int token) {
    return token * row_bytes(shape);
  }
};
template <int kSteps, int kTiles>
struct TokenBoxes {
  static constexpr int kRowBytes = 32;
  static constexpr int kTileBytes = kTileTokens * kRowBytes;
  static constexpr int kStepBytes = kTiles * kTileBytes;
  static constexpr int kPieceBytes = kSteps * kStepBytes;

  EFFINFER_DEVICE static constexpr int place_bytes(const FeedShape& shape, int) {
    return kPieceBytes << shape.hold_bits;
  }
  EFFINFER_DEVICE static int at(const FeedShape&, int token) { return token * kRowBytes; }
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
