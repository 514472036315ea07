// How weights and activations come to a warp of stream_matmul.h: through shared memory. A warp
// multiplies a *piece* at a time: a superblock of its 32 rows, of dense weights half of one. What
// comes at once is a *place*: one piece, or two where they are small. A warp's own memory, in bytes
// from the first:
//
//   barriers   an Mbarrier for each place, where the GPU has them
//   weights    [place][half of the lanes][piece] the bytes of a row group, as they lie in memory: k
//              goes on, so that what comes is one run of bytes
//
// and of the block's warps with the same slice of k, which are a *team*, [place][token] the
// activations of a place, 32 bytes a step, of as many tokens as the block has; step s lies at
// s ^ token % 8, % 4 or token / 2 % 2, by their number, so that the 32 lanes' reads of 8 bytes, of 8
// tokens each, meet all banks evenly. Behind them are zeros, for tokens that are none.
//
// Who copies: on Hopper one lane asks for all of a place's weights with one copy for each group,
// and nobody spends an instruction on their addresses. Elsewhere lanes copy 16 bytes each, in
// groups of copies that are counted; so do the warps of a team for tokens, each its share. (Loads
// into registers would be waited for together: a warp has six counters for them, and ptxas gives
// all pieces under way the same one.)
#pragma once

#include <cstdint>

#include "cuda/bodies/dequant.h"
#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

inline constexpr int kTileTokens = 8;  // columns of a product
inline constexpr int kMostPlaces = 5;
inline constexpr int kBulkPlaces = 3;  // on Hopper always

// Of pieces of a format, in places for blocks with so many tiles of tokens.
struct PieceLayout {
  int steps;        // of 16 k
  int group_bytes;  // of half of its rows
  int hold;         // pieces of a place: 2 where they are small and few tokens share the memory

  constexpr int parts() const { return 4 / steps; }  // pieces of a superblock
  constexpr int place_bytes() const { return hold * 2 * group_bytes; }
  constexpr int token_bytes() const { return hold * steps * 32; }  // of one in a place
};

constexpr PieceLayout piece_layout(const ops::PackedFormat& format, int tiles) {
  const int steps = format.scales == ops::ScaleKind::dense ? 2 : 4;
  const auto bytes = static_cast<int>(ops::superblock_bytes(format) * steps / 4);
  return {steps, bytes, tiles == 1 && bytes <= 640 ? 2 : 1};
}

inline constexpr int kBarrierBytes = 64;
static_assert(kMostPlaces * sizeof(Mbarrier) <= kBarrierBytes);

// Of a warp, and of a team's tokens with their zeros.
constexpr int feed_bytes(const PieceLayout& piece, int places) {
  return kBarrierBytes + places * piece.place_bytes();
}
constexpr int token_bytes(const PieceLayout& piece, int places, int tokens) {
  return (places * tokens + 1) * piece.token_bytes();
}

// The warps of a block that multiply the same k with tokens that they share.
struct Team {
  int rank;
  int size;
  int id;  // of its barrier

  // All have read what is copied over from now on, and all copies that were waited for are there.
  template <class Unit>
  EFFINFER_DEVICE void sync(Unit& unit) const {
    if (size > 1) {
      unit.sync_some(id, size * kWarp);
    } else {
      unit.sync_warp();
    }
  }
};

// What is left of a warp's ring from one of its slices of k to the next.
struct FeedState {
  int place = 0;   // that is read next
  int parity = 0;  // of its barrier's phase
};

// Where pieces [first, last) of a row group are cut into places, none of which is under two rows of
// a header.
template <int kHold>
struct PieceCut {
  int next;
  int last;

  // None where all are taken.
  EFFINFER_DEVICE int take() {
    const int left = last - next;
    int count = kHold - next % kHold;
    if (count > left) count = left;
    next += count;
    return count;
  }
  EFFINFER_DEVICE bool is_over() const { return next >= last; }
};

// What a lane copies of the activations of tokens x[0 .. count), 16 bytes of each few of them, and
// what it multiplies: four k of a token in each step.
template <int kTiles, int kSteps, int kHold>
class TokenCopies {
 public:
  static constexpr int kBytes = kHold * kSteps * 32;  // of a token in a place

  template <class Unit>
  EFFINFER_DEVICE TokenCopies(const Unit& unit, const Team& team, const uint8_t* x,
                              int64_t row_bytes, int count, int first)
      : step_(team.size * kRows), count_(count), row_bytes_(row_bytes) {
    token_ = team.rank * kRows + unit.lane / kQuads;
    quad_ = unit.lane % kQuads;
    from_ = x + first * (kSteps * 32) + quad_ * 16;
  }

  // Puts those of the next `pieces` on their way.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, uint8_t* tokens, int pieces) {
    const bool mine = quad_ < pieces * (kQuads / kHold);
    EFFINFER_NO_UNROLL
    for (int token = token_; token - unit.lane / kQuads < count_; token += step_) {
      unit.copy_async_if(mine && token < count_, tokens + place_of(token, quad_),
                         from_ + token * row_bytes_);
    }
    from_ += pieces * (kSteps * 32);
  }

  // The same at once: a copy on its way is waited for with all that were before it.
  template <class Unit>
  EFFINFER_DEVICE void fetch_now(Unit& unit, uint8_t* tokens, int pieces) {
    const bool mine = quad_ < pieces * (kQuads / kHold);
    EFFINFER_NO_UNROLL
    for (int token = token_; mine && token < count_; token += step_) {
      *reinterpret_cast<Quad*>(tokens + place_of(token, quad_)) =
          unit.load_written(reinterpret_cast<const Quad*>(from_ + token * row_bytes_));
    }
    from_ += pieces * (kSteps * 32);
  }

  // How the steps of a token are moved about.
  EFFINFER_DEVICE static int turn(int token) {
    constexpr int kAll = kHold * kSteps;
    return kAll == 8 ? token % 8 : kAll == 4 ? token % 4 : token / 2 % 2;
  }

 private:
  static constexpr int kQuads = kBytes / 16;
  static constexpr int kRows = kWarp / kQuads;  // tokens of a warp's round
  static_assert(kTiles * kTileTokens >= kRows);

  EFFINFER_DEVICE static int place_of(int token, int quad) {
    return token * kBytes + (quad / 2 ^ turn(token)) * 32 + quad % 2 * 16;
  }

  const uint8_t* from_;  // in the next place's k of the first token
  int token_;            // of the first round
  int quad_;
  int step_;
  int count_;
  int64_t row_bytes_;
};

// What both feeds are made with: row groups, of which each half of the lanes has one, pieces
// [first, last) of k, and the memory of the warp and of its team's tokens.
struct FeedSource {
  const uint8_t* groups[2];  // first superblocks
  int first;
  int last;
  uint8_t* memory;
  uint8_t* tokens;
  int token_place;  // bytes
  int places;
  Team team;
};

// Of bulk copies, once before all feeds of a warp.
template <class Unit>
EFFINFER_DEVICE void init_barriers(Unit& unit, uint8_t* memory, int places) {
  if (unit.lane < places) unit.barrier_init(reinterpret_cast<Mbarrier*>(memory)[unit.lane], 1);
  unit.fence_async();
  unit.sync_warp();
}

// Copies of whole places, by one lane.
template <ops::PackedFormat kFormat, int kTiles>
class BulkFeed {
  static constexpr PieceLayout kPiece = piece_layout(kFormat, kTiles);
  static constexpr int kGroupBytes = kPiece.group_bytes;
  static constexpr int kHold = kPiece.hold;
  static constexpr int kPlaceBytes = kPiece.place_bytes();

 public:
  using Tokens = TokenCopies<kTiles, kPiece.steps, kHold>;

  template <class Unit>
  EFFINFER_DEVICE BulkFeed(Unit& unit, const FeedSource& source, FeedState& state)
      : source_(source), state_(state), asked_{source.first, source.last}, to_(state.place) {
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kBulkPlaces - 1; ++i) fetch(unit);
  }

  // After wait_for_inputs().
  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, Tokens& tokens) {
    PieceCut<kHold> cut{source_.first, source_.last};
    int to = state_.place;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kBulkPlaces - 1; ++i) {
      tokens.fetch(unit, source_.tokens + to * source_.token_place, cut.take());
      unit.commit();
      advance(to);
    }
  }

  // Waits for the next place and asks for another one.
  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, Tokens& tokens) {
    const int place = state_.place;
    weights = source_.memory + kBarrierBytes + place * kPlaceBytes +
              unit.lane / 16 * (kHold * kGroupBytes);
    of_tokens = source_.tokens + place * source_.token_place;
    unit.template wait<kBulkPlaces - 2>();
    source_.team.sync(unit);
    uint8_t* const to = source_.tokens + to_ * source_.token_place;
    tokens.fetch(unit, to, fetch(unit));
    unit.commit();
    unit.barrier_wait(barriers()[place], state_.parity);
    advance(state_.place);
    if (state_.place == 0) state_.parity ^= 1;
  }

  const uint8_t* weights = nullptr;  // of the lane's group
  const uint8_t* of_tokens = nullptr;

 private:
  EFFINFER_DEVICE Mbarrier* barriers() const {
    return reinterpret_cast<Mbarrier*>(source_.memory);
  }
  EFFINFER_DEVICE static void advance(int& place) {
    if (++place == kBulkPlaces) place = 0;
  }

  // Returns how many pieces are on their way, which may be none.
  template <class Unit>
  EFFINFER_DEVICE int fetch(Unit& unit) {
    const int64_t from = int64_t{asked_.next} * kGroupBytes;
    const int pieces = asked_.take();
    const int bytes = pieces * kGroupBytes;
    if (unit.lane == 0 && pieces > 0) {
      Mbarrier& barrier = barriers()[to_];
      uint8_t* to = source_.memory + kBarrierBytes + to_ * kPlaceBytes;
      unit.barrier_arrive_expect(barrier, 2 * bytes);
      unit.copy_bulk(to, source_.groups[0] + from, bytes, barrier);
      unit.copy_bulk(to + kHold * kGroupBytes, source_.groups[1] + from, bytes, barrier);
    }
    advance(to_);
    return pieces;
  }

  const FeedSource& source_;
  FeedState& state_;
  PieceCut<kHold> asked_;
  int to_;  // place of the next copies
};

// The oldest of `ahead` groups of copies under way is there. Instructions take a constant.
template <class Unit>
EFFINFER_DEVICE void wait_for_oldest(Unit& unit, int ahead) {
  static_assert(kMostPlaces == 5);
  if (ahead == 4) {
    unit.template wait<3>();
  } else if (ahead == 3) {
    unit.template wait<2>();
  } else if (ahead == 2) {
    unit.template wait<1>();
  } else {
    unit.template wait<0>();
  }
}

// Copies of 16 bytes by all lanes, tokens and weights of a place in one group.
template <ops::PackedFormat kFormat, int kTiles>
class LaneFeed {
  static constexpr PieceLayout kPiece = piece_layout(kFormat, kTiles);
  static constexpr int kGroupBytes = kPiece.group_bytes;
  static constexpr int kHold = kPiece.hold;
  static constexpr int kPlaceBytes = kPiece.place_bytes();

 public:
  using Tokens = TokenCopies<kTiles, kPiece.steps, kHold>;

  template <class Unit>
  EFFINFER_DEVICE LaneFeed(Unit& unit, const FeedSource& source, FeedState&)
      : source_(source), asked_{source.first, source.last} {
    const uint8_t* group = unit.lane < kWarp / 2 ? source.groups[0] : source.groups[1];
    from_ = group + int64_t{source.first} * kGroupBytes + unit.lane % 16 * 16;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < source.places - 1; ++i) {
      fetch(unit);
      unit.commit();
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, Tokens& tokens) {
    PieceCut<kHold> cut{source_.first, source_.last};
    for (int place = 0; place < source_.places - 1; ++place) {
      tokens.fetch_now(unit, source_.tokens + place * source_.token_place, cut.take());
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, Tokens& tokens) {
    weights = weights_of(unit, place_);
    of_tokens = source_.tokens + place_ * source_.token_place;
    wait_for_oldest(unit, source_.places - 1);
    source_.team.sync(unit);
    uint8_t* const to = source_.tokens + to_ * source_.token_place;
    tokens.fetch(unit, to, fetch(unit));
    unit.commit();
    if (++place_ == source_.places) place_ = 0;
  }

  const uint8_t* weights = nullptr;  // of the lane's group
  const uint8_t* of_tokens = nullptr;

 private:
  template <class Unit>
  EFFINFER_DEVICE uint8_t* weights_of(Unit& unit, int place) const {
    return source_.memory + kBarrierBytes + place * kPlaceBytes +
           unit.lane / 16 * (kHold * kGroupBytes);
  }

  // Half of the lanes have a group. Returns how many pieces are on their way.
  template <class Unit>
  EFFINFER_DEVICE int fetch(Unit& unit) {
    const int pieces = asked_.take();
    uint8_t* to = weights_of(unit, to_) + unit.lane % 16 * 16;
    const int bytes = pieces * kGroupBytes - unit.lane % 16 * 16;
    EFFINFER_UNROLL
    for (int at = 0; at < kHold * kGroupBytes; at += 256) {
      unit.copy_async_if(at < bytes, to + at, from_ + at);
    }
    from_ += pieces * kGroupBytes;
    if (++to_ == source_.places) to_ = 0;
    return pieces;
  }

  const FeedSource& source_;
  const uint8_t* from_;
  PieceCut<kHold> asked_;
  int to_ = 0;
  int place_ = 0;
};

}  // namespace effinfer::cuda
