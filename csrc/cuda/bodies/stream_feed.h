// How weights and activations come to a warp of stream_matmul.h: through shared memory. A warp
// multiplies a *piece* at a time: a superblock of its 32 rows, of dense weights half of one. What
// comes at once is a *place*: one, two or four pieces, as the launch says. A warp's own memory, in
// bytes from the first:
//
//   barriers   an Mbarrier for each place, where the GPU has them
//   weights    [place][half of the lanes][piece] the bytes of a row group, as they lie in memory: k
//              goes on, so that what comes is one run of bytes
//
// and of the block's warps with the same slice of k, which are a *team*, [piece][token] the
// activations, 32 bytes a step, of as many tokens as the block has; step s lies at s ^ token % 4
// (of two steps: s ^ token / 2 % 2), so that the 32 lanes' reads of 8 bytes, of 8 tokens each, meet
// all banks evenly. Before them are zeros, for tokens that are none.
//
// Who copies: on Hopper one lane asks for all of a place's weights with one copy for each group,
// and nobody spends an instruction on their addresses. Elsewhere lanes copy 16 bytes each, in
// groups of copies that are counted; so do the warps of a team for tokens, each its share. (Loads
// into registers would be waited for together: a warp has six counters for them, and ptxas gives
// all pieces under way the same one.)
#pragma once

#include <cstdint>

#include "cuda/bodies/stream_tokens.h"
#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

inline constexpr int kTileTokens = 8;  // columns of a product
inline constexpr int kMostPlaces = 5;

// Of pieces of a format.
struct PieceLayout {
  int steps;        // of 16 k
  int group_bytes;  // of half of its rows

  constexpr int parts() const { return 4 / steps; }  // pieces of a superblock
  constexpr int token_bytes() const { return steps * 32; }
};

constexpr PieceLayout piece_layout(const ops::PackedFormat& format) {
  const int steps = format.scales == ops::ScaleKind::dense ? 2 : 4;
  return {steps, static_cast<int>(ops::superblock_bytes(format) * steps / 4)};
}

inline constexpr int kBarrierBytes = 64;
static_assert(kMostPlaces * sizeof(Mbarrier) <= kBarrierBytes);

// Of a warp, and of a team's tokens with their zeros.
constexpr int feed_bytes(const PieceLayout& piece, const FeedShape& shape) {
  return kBarrierBytes + shape.places * shape.hold() * 2 * piece.group_bytes;
}
constexpr int token_bytes(const PieceLayout& piece, const FeedShape& shape, int tokens) {
  return (shape.places * shape.hold() * tokens + 1) * piece.token_bytes();
}

// What is left of a warp's ring from one of its slices of k to the next.
struct FeedState {
  int place = 0;   // that is read next
  int parity = 0;  // of its barrier's phase
};

// Where pieces [first, last) of a row group are cut into places, none of which is under two rows of
// a header.
struct PieceCut {
  int next;
  int last;
  int hold;

  // None where all are taken.
  EFFINFER_DEVICE int take() {
    const int left = last - next;
    int count = hold - (next & (hold - 1));
    if (count > left) count = left;
    next += count;
    return count;
  }
  EFFINFER_DEVICE bool is_over() const { return next >= last; }
};

// What both feeds are made with: row groups, of which each half of the lanes has one, pieces
// [first, last) of k, and the memory of the warp and of its team's tokens.
struct FeedSource {
  const uint8_t* groups[2];  // first superblocks
  int first;
  int last;
  FeedShape shape;
  uint8_t* memory;
  uint8_t* tokens;
  int token_piece;  // bytes
  Team team;

  EFFINFER_DEVICE PieceCut cut() const { return {first, last, shape.hold()}; }
};

// Of bulk copies, once before all feeds of a warp. Who copies makes them; the others wait for none
// before they have met.
template <class Unit>
EFFINFER_DEVICE void init_barriers(Unit& unit, uint8_t* memory, int places) {
  if (unit.lane == 0) {
    EFFINFER_NO_UNROLL
    for (int i = 0; i < places; ++i) {
      unit.barrier_init(reinterpret_cast<Mbarrier*>(memory)[i], 1);
    }
  }
  unit.fence_async();
}

// What feeds have in common: what lies where.
template <ops::PackedFormat kFormat>
class Feed {
 public:
  static constexpr PieceLayout kPiece = piece_layout(kFormat);
  static constexpr int kGroupBytes = kPiece.group_bytes;
  using Tokens = TokenCopies<kPiece.steps>;

  const uint8_t* weights = nullptr;  // of the lane's group, in the place
  const uint8_t* of_tokens = nullptr;

 protected:
  EFFINFER_DEVICE explicit Feed(const FeedSource& source) : source_(source) {}

  EFFINFER_DEVICE uint8_t* weights_in(int place, int half) const {
    return source_.memory + kBarrierBytes +
           (place * 2 + half) * (kGroupBytes << source_.shape.hold_bits);
  }
  EFFINFER_DEVICE uint8_t* tokens_in(int place) const {
    return source_.tokens + place * (source_.token_piece << source_.shape.hold_bits);
  }
  EFFINFER_DEVICE void advance(int& place) const {
    if (++place == source_.shape.places) place = 0;
  }

  const FeedSource& source_;
};

// Copies of whole places, by one lane.
template <ops::PackedFormat kFormat>
class BulkFeed : public Feed<kFormat> {
  using Base = Feed<kFormat>;
  using Base::advance;
  using Base::source_;

 public:
  using Tokens = typename Base::Tokens;

  template <class Unit>
  EFFINFER_DEVICE BulkFeed(Unit& unit, const FeedSource& source, FeedState& state)
      : Base(source), state_(state), asked_(source.cut()), to_(state.place) {
    EFFINFER_NO_UNROLL
    for (int i = 0; i < source.shape.places - 1; ++i) fetch(unit);
  }

  // After wait_for_inputs().
  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, Tokens& tokens) {
    PieceCut cut = source_.cut();
    int to = state_.place;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < source_.shape.places - 1; ++i) {
      tokens.fetch(unit, this->tokens_in(to), cut.take());
      advance(to);
    }
    unit.commit();
  }

  // Waits for the next place and asks for another one.
  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, Tokens& tokens) {
    const int place = state_.place;
    this->weights = this->weights_in(place, unit.lane / 16);
    this->of_tokens = this->tokens_in(place);
    unit.template wait<0>();
    source_.team.sync(unit);  // for all lanes, and all have read what the next copies replace
    uint8_t* const to = this->tokens_in(to_);
    tokens.fetch(unit, to, fetch(unit));
    unit.commit();
    unit.barrier_wait(barriers()[place], state_.parity);
    advance(state_.place);
    if (state_.place == 0) state_.parity ^= 1;
  }

 private:
  EFFINFER_DEVICE Mbarrier* barriers() const { return reinterpret_cast<Mbarrier*>(source_.memory); }

  // Returns how many pieces are on their way, which may be none.
  template <class Unit>
  EFFINFER_DEVICE int fetch(Unit& unit) {
    const int64_t from = int64_t{asked_.next} * Base::kGroupBytes;
    const int pieces = asked_.take();
    const int bytes = pieces * Base::kGroupBytes;
    if (unit.lane == 0 && pieces > 0) {
      Mbarrier& barrier = barriers()[to_];
      unit.barrier_arrive_expect(barrier, 2 * bytes);
      unit.copy_bulk(this->weights_in(to_, 0), source_.groups[0] + from, bytes, barrier);
      unit.copy_bulk(this->weights_in(to_, 1), source_.groups[1] + from, bytes, barrier);
    }
    advance(to_);
    return pieces;
  }

  FeedState& state_;
  PieceCut asked_;
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
template <ops::PackedFormat kFormat>
class LaneFeed : public Feed<kFormat> {
  using Base = Feed<kFormat>;
  using Base::advance;
  using Base::source_;

 public:
  using Tokens = typename Base::Tokens;

  template <class Unit>
  EFFINFER_DEVICE LaneFeed(Unit& unit, const FeedSource& source, FeedState&)
      : Base(source), asked_(source.cut()) {
    const uint8_t* group = unit.lane < kWarp / 2 ? source.groups[0] : source.groups[1];
    from_ = group + int64_t{source.first} * Base::kGroupBytes + unit.lane % 16 * 16;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < source.shape.places - 1; ++i) {
      fetch(unit);
      unit.commit();
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, Tokens& tokens) {
    PieceCut cut = source_.cut();
    EFFINFER_NO_UNROLL
    for (int place = 0; place < source_.shape.places - 1; ++place) {
      tokens.fetch_now(unit, this->tokens_in(place), cut.take());
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, Tokens& tokens) {
    this->weights = this->weights_in(place_, unit.lane / 16);
    this->of_tokens = this->tokens_in(place_);
    wait_for_oldest(unit, source_.shape.places - 1);
    source_.team.sync(unit);  // for all lanes, and all have read what the next copies replace
    uint8_t* const to = this->tokens_in(to_);
    tokens.fetch(unit, to, fetch(unit));
    unit.commit();
    advance(place_);
  }

 private:
  // Half of the lanes have a group. Returns how many pieces are on their way.
  template <class Unit>
  EFFINFER_DEVICE int fetch(Unit& unit) {
    const int pieces = asked_.take();
    uint8_t* to = this->weights_in(to_, unit.lane / 16) + unit.lane % 16 * 16;
    const int bytes = pieces * Base::kGroupBytes;
    EFFINFER_NO_UNROLL
    for (int at = 0; at < bytes; at += 256) {
      unit.copy_async_if(at + unit.lane % 16 * 16 < bytes, to + at, from_ + at);
    }
    from_ += bytes;
    advance(to_);
    return pieces;
  }

  const uint8_t* from_;
  PieceCut asked_;
  int to_ = 0;
  int place_ = 0;
};

}  // namespace effinfer::cuda
