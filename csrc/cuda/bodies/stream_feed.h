// How weights and activations come to a warp of stream_matmul.h: through its own part of the
// block's shared memory. A warp multiplies a *piece* at a time: a superblock of its 32 rows, of
// dense weights half of one. Its memory, in bytes from the first:
//
//   barriers   an Mbarrier for each place, where the GPU has them
//   weights    [place][half of the lanes][piece of the place] the bytes of a row group, as they lie
//              in memory: k goes on, so that what comes is one run of bytes
//   tokens     [place][piece of the place][token] 32 bytes a step, of as many tokens as the block
//              has; step s lies at s ^ token % 4 (of two steps: s ^ token / 2 % 2), so that the 32
//              lanes' reads of 8 bytes, of 8 tokens each, meet all banks evenly
//   zeros      a token's piece, for tokens that are none
//
// Who copies: on Hopper one lane asks for all of a place's weights with one copy for each group,
// and nobody spends an instruction on their addresses. Elsewhere lanes copy 16 bytes each, in
// groups of copies that are counted. Loads into registers would be waited for together: a warp has
// six counters for them, and ptxas gives all pieces under way the same one.
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
  constexpr int token_bytes() const { return steps * 32; }
  constexpr int place_bytes() const { return hold * 2 * group_bytes; }
  constexpr int place_tokens(int tokens) const { return hold * tokens * token_bytes(); }
};

constexpr PieceLayout piece_layout(const ops::PackedFormat& format, int tiles) {
  const int steps = format.scales == ops::ScaleKind::dense ? 2 : 4;
  const auto bytes = static_cast<int>(ops::superblock_bytes(format) * steps / 4);
  return {steps, bytes, tiles == 1 && bytes <= 640 ? 2 : 1};
}

// How a warp's memory is divided.
struct FeedLayout {
  static constexpr int kBarrierBytes = 64;
  static_assert(kMostPlaces * sizeof(Mbarrier) <= kBarrierBytes);

  int places;
  int tokens_from;  // in bytes
  int token_place;  // bytes
  int zeros_from;
  int bytes;

  EFFINFER_DEVICE constexpr FeedLayout(const PieceLayout& piece, int num_places, int tokens)
      : places(num_places),
        tokens_from(kBarrierBytes + num_places * piece.place_bytes()),
        token_place(piece.place_tokens(tokens)),
        zeros_from(tokens_from + num_places * token_place),
        bytes(zeros_from + piece.token_bytes()) {}
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
template <int kTiles, int kSteps>
class TokenCopies {
 public:
  template <class Unit>
  EFFINFER_DEVICE TokenCopies(const Unit& unit, const uint8_t* x, int64_t row_bytes, int count,
                              int first)
      : next_rows_(static_cast<int32_t>(kRows * row_bytes)) {
    const int token = unit.lane / kQuads;
    const int quad = unit.lane % kQuads;
    from_ = x + first * kBytes + token * row_bytes + quad * 16;
    to_ = token * kBytes + (quad / 2 ^ turn(token)) * 32 + quad % 2 * 16;
    rounds_ = count > token ? (count - token + kRows - 1) / kRows : 0;
  }

  // Puts those of the next pieces on their way, `bytes` apart.
  template <int kPieces, class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, uint8_t* tokens, int bytes, int pieces) {
    EFFINFER_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      EFFINFER_UNROLL
      for (int round = 0; round < kRounds; ++round) {
        unit.copy_async_if(round < rounds_ && i < pieces,
                           tokens + i * bytes + to_ + round * (kRows * kBytes),
                           from_ + i * kBytes + round * int64_t{next_rows_});
      }
    }
    from_ += pieces * kBytes;
  }

  // The next piece at once: a copy on its way is waited for with all that were before it.
  template <class Unit>
  EFFINFER_DEVICE void fetch_now(Unit& unit, uint8_t* tokens) {
    EFFINFER_NO_UNROLL
    for (int round = 0; round < rounds_; ++round) {
      *reinterpret_cast<Quad*>(tokens + to_ + round * (kRows * kBytes)) =
          unit.load_written(reinterpret_cast<const Quad*>(from_ + round * int64_t{next_rows_}));
    }
    from_ += kBytes;
  }

  // How the steps of a token are moved about.
  EFFINFER_DEVICE static int turn(int token) { return kSteps == 4 ? token % 4 : token / 2 % 2; }

 private:
  static constexpr int kBytes = kSteps * 32;  // of a token in a piece
  static constexpr int kQuads = kBytes / 16;
  static constexpr int kRows = kWarp / kQuads;  // a round's tokens, of one turn
  static constexpr int kRounds = kTiles * kTileTokens / kRows;

  const uint8_t* from_;  // in the next piece's k
  int32_t next_rows_;
  int to_;
  int rounds_;  // that have a token
};

// What both feeds are made with: row groups, of which each half of the lanes has one, the tokens,
// and pieces [first, last) of k.
struct FeedSource {
  const uint8_t* groups[2];  // first superblocks
  const uint8_t* x;
  int64_t x_row_bytes;
  int count;  // of tokens
  int first;
  int last;
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
  static constexpr int kSteps = kPiece.steps;
  static constexpr int kGroupBytes = kPiece.group_bytes;
  static constexpr int kHold = kPiece.hold;
  static constexpr int kTokenBytes = kPiece.token_bytes();
  static constexpr int kPlaceBytes = kPiece.place_bytes();

 public:
  template <class Unit>
  EFFINFER_DEVICE BulkFeed(Unit& unit, const FeedSource& source, const FeedLayout& layout,
                           uint8_t* memory, FeedState& state)
      : layout_(layout),
        memory_(memory),
        state_(state),
        asked_{source.first, source.last},
        token_cut_{source.first, source.last},
        to_(state.place) {
    for (int half = 0; half < 2; ++half) {
      from_[half] = source.groups[half] + int64_t{source.first} * kGroupBytes;
    }
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kBulkPlaces - 1; ++i) fetch(unit);
  }

  // After wait_for_inputs().
  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, TokenCopies<kTiles, kSteps>& tokens, int) {
    token_to_ = state_.place;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kBulkPlaces - 1; ++i) fetch_tokens(unit, tokens);
  }

  // Waits for the next place and asks for another one.
  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, TokenCopies<kTiles, kSteps>& tokens) {
    const int place = state_.place;
    weights = memory_ + FeedLayout::kBarrierBytes + place * kPlaceBytes +
              unit.lane / 16 * (kHold * kGroupBytes);
    of_tokens = memory_ + layout_.tokens_from + place * layout_.token_place;
    unit.template wait<kBulkPlaces - 2>();
    unit.sync_warp();  // for all lanes, and all have read what the next copies replace
    fetch(unit);
    fetch_tokens(unit, tokens);
    unit.barrier_wait(barriers()[place], state_.parity);
    advance(state_.place);
    if (state_.place == 0) state_.parity ^= 1;
  }

  const uint8_t* weights = nullptr;  // of the lane's group
  const uint8_t* of_tokens = nullptr;

 private:
  EFFINFER_DEVICE Mbarrier* barriers() const { return reinterpret_cast<Mbarrier*>(memory_); }
  EFFINFER_DEVICE static void advance(int& place) {
    if (++place == kBulkPlaces) place = 0;
  }

  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit) {
    if (asked_.is_over()) return;
    const int bytes = asked_.take() * kGroupBytes;
    if (unit.lane == 0) {
      Mbarrier& barrier = barriers()[to_];
      uint8_t* to = memory_ + FeedLayout::kBarrierBytes + to_ * kPlaceBytes;
      unit.barrier_arrive_expect(barrier, 2 * bytes);
      unit.copy_bulk(to, from_[0], bytes, barrier);
      unit.copy_bulk(to + kHold * kGroupBytes, from_[1], bytes, barrier);
    }
    from_[0] += bytes;
    from_[1] += bytes;
    advance(to_);
  }

  template <class Unit>
  EFFINFER_DEVICE void fetch_tokens(Unit& unit, TokenCopies<kTiles, kSteps>& tokens) {
    if (!token_cut_.is_over()) {
      uint8_t* to = memory_ + layout_.tokens_from + token_to_ * layout_.token_place;
      tokens.template fetch<kHold>(unit, to, layout_.token_place / kHold, token_cut_.take());
      advance(token_to_);
    }
    unit.commit();
  }

  const FeedLayout& layout_;
  uint8_t* memory_;
  FeedState& state_;
  const uint8_t* from_[2];
  PieceCut<kHold> asked_;
  PieceCut<kHold> token_cut_;
  int to_;  // place of the next copies
  int token_to_ = 0;
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
  static constexpr int kSteps = kPiece.steps;
  static constexpr int kGroupBytes = kPiece.group_bytes;
  static constexpr int kHold = kPiece.hold;
  static constexpr int kPlaceBytes = kPiece.place_bytes();

 public:
  template <class Unit>
  EFFINFER_DEVICE LaneFeed(Unit& unit, const FeedSource& source, const FeedLayout& layout,
                           uint8_t* memory, FeedState&)
      : layout_(layout),
        memory_(memory),
        from_(source.groups[unit.lane / 16] + int64_t{source.first} * kGroupBytes +
              unit.lane % 16 * 16),
        asked_{source.first, source.last} {
    EFFINFER_NO_UNROLL
    for (int i = 0; i < layout.places - 1; ++i) {
      fetch(unit);
      unit.commit();
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, TokenCopies<kTiles, kSteps>& tokens, int first) {
    PieceCut<kHold> cut{first, asked_.last};
    for (int place = 0; place < layout_.places - 1 && !cut.is_over(); ++place) {
      const int pieces = cut.take();
      EFFINFER_NO_UNROLL
      for (int i = 0; i < pieces; ++i) tokens.fetch_now(unit, tokens_of(place, i));
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, TokenCopies<kTiles, kSteps>& tokens) {
    weights = weights_of(unit, place_);
    of_tokens = tokens_of(place_, 0);
    wait_for_oldest(unit, layout_.places - 1);
    unit.sync_warp();  // for all lanes, and all have read what the next copies replace
    const int to = to_;
    const int pieces = fetch(unit);
    tokens.template fetch<kHold>(unit, tokens_of(to, 0), layout_.token_place / kHold, pieces);
    unit.commit();
    if (++place_ == layout_.places) place_ = 0;
  }

  const uint8_t* weights = nullptr;  // of the lane's group
  const uint8_t* of_tokens = nullptr;

 private:
  template <class Unit>
  EFFINFER_DEVICE uint8_t* weights_of(Unit& unit, int place) const {
    return memory_ + FeedLayout::kBarrierBytes + place * kPlaceBytes +
           unit.lane / 16 * (kHold * kGroupBytes);
  }
  EFFINFER_DEVICE uint8_t* tokens_of(int place, int piece) const {
    return memory_ + layout_.tokens_from + place * layout_.token_place +
           piece * (layout_.token_place / kHold);
  }

  // Half of the lanes have a group. Returns the pieces of the place.
  template <class Unit>
  EFFINFER_DEVICE int fetch(Unit& unit) {
    if (asked_.is_over()) return 0;
    const int pieces = asked_.take();
    uint8_t* to = weights_of(unit, to_) + unit.lane % 16 * 16;
    const int bytes = pieces * kGroupBytes - unit.lane % 16 * 16;
    EFFINFER_UNROLL
    for (int at = 0; at < kHold * kGroupBytes; at += 256) {
      unit.copy_async_if(at < bytes, to + at, from_ + at);
    }
    from_ += pieces * kGroupBytes;
    if (++to_ == layout_.places) to_ = 0;
    return pieces;
  }

  const FeedLayout& layout_;
  uint8_t* memory_;
  const uint8_t* from_;
  PieceCut<kHold> asked_;
  int to_ = 0;
  int place_ = 0;
};

}  // namespace effinfer::cuda
