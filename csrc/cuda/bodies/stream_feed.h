// How weights and activations come to a warp of stream_matmul.h: through shared memory. A warp
// multiplies a *piece* at a time: a superblock of its 32 rows, of dense weights half of one. What
// comes at once is a *place*: one, two or four pieces, as the launch says. A warp's own memory, in
// bytes from the first:
//
//   barriers   an Mbarrier for each place, where the GPU has them
//   weights    [place][half of the lanes][piece] the bytes of a row group, as they lie in memory: k
//              goes on, so that what comes is one run of bytes
//
// and of the block's warps with the same slice of k, which are a *team*:
//
//   barriers   as those of a warp, of a team of several
//   tokens     [place] the activations of as many tokens as the block has (stream_tokens.h)
//
// Who copies: on Hopper a lane asks for what a place has of a row group or of a token with one
// copy, and nobody spends instructions on more addresses. Elsewhere lanes copy 16 bytes each, in
// groups of copies that are counted. (Loads into registers would be waited for together: a warp has
// six counters for them, and ptxas gives all pieces under way the same one.)
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
  constexpr int token_row_bytes(const FeedShape& shape) const {
    return steps == 4 ? TokenPlace<4>::row_bytes(shape) : TokenPlace<2>::row_bytes(shape);
  }
};

constexpr PieceLayout piece_layout(const ops::PackedFormat& format) {
  const int steps = format.scales == ops::ScaleKind::dense ? 2 : 4;
  return {steps, static_cast<int>(ops::superblock_bytes(format) * steps / 4)};
}

inline constexpr int kBarrierBytes = 64;
static_assert(kMostPlaces * sizeof(Mbarrier) <= kBarrierBytes);

// Of a warp, and of a team's tokens.
constexpr int feed_bytes(const PieceLayout& piece, const FeedShape& shape) {
  return kBarrierBytes + shape.places * shape.hold() * 2 * piece.group_bytes;
}
constexpr int token_bytes(const PieceLayout& piece, const FeedShape& shape, int tokens) {
  return kBarrierBytes + shape.places * tokens * piece.token_row_bytes(shape);
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
  uint8_t* team_memory;
  Team team;
  int num_tokens;
  int token_place;  // bytes

  EFFINFER_DEVICE PieceCut cut() const { return {first, last, shape.hold()}; }
};

// Of bulk copies, once before all feeds of a warp or of a team.
template <class Unit>
EFFINFER_DEVICE void init_barriers(Unit& unit, uint8_t* memory, int places) {
  if (unit.lane == 0) {
    EFFINFER_NO_UNROLL
    for (int i = 0; i < places; ++i) {
      unit.barrier_init(reinterpret_cast<Mbarrier*>(memory)[i], 1);
    }
  }
  unit.fence_async();
  unit.sync_warp();
}

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

  // From the first group's weights to those of the lane's.
  EFFINFER_DEVICE int group_at(int lane) const { return lane / 16 * half_bytes_; }

 protected:
  template <class Unit>
  EFFINFER_DEVICE Feed(Unit& unit, const FeedSource& source)
      : memory_(unit.kept_shared(source.memory)),
        team_memory_(unit.kept_shared(source.team_memory)),
        half_bytes_(unit.kept(kGroupBytes << source.shape.hold_bits)),
        token_place_(unit.kept(source.token_place)),
        places_(unit.kept(source.shape.places)) {}

  EFFINFER_DEVICE uint8_t* weights_in(int place, int half) const {
    return memory_ + kBarrierBytes + (place * 2 + half) * half_bytes_;
  }
  EFFINFER_DEVICE uint8_t* tokens_in(int place) const {
    return team_memory_ + kBarrierBytes + place * token_place_;
  }
  EFFINFER_DEVICE void advance(int& place) const {
    if (++place == places_) place = 0;
  }

  uint8_t* const memory_;
  uint8_t* const team_memory_;
  const int half_bytes_;
  const int token_place_;
  const int places_;
};

// Bulk copies of whole places. The two lanes that have copied a place's weights tell the warp's
// barrier, those that have copied its tokens the team's, which for one warp is the same.
template <ops::PackedFormat kFormat>
class BulkFeed : public Feed<kFormat> {
  using Base = Feed<kFormat>;
  using Base::advance;

 public:
  using Tokens = BulkTokens<Base::kPiece.steps>;
  static constexpr int kTogether = 2;  // pieces that are multiplied as one, where that pays

  template <class Unit>
  EFFINFER_DEVICE BulkFeed(Unit& unit, const FeedSource& source, FeedState& state)
      : Base(unit, source),
        state_(state),
        team_(source.team),
        full_(reinterpret_cast<Mbarrier*>(this->memory_)),
        tokens_full_(reinterpret_cast<Mbarrier*>(team_.is_one() ? this->memory_
                                                                : this->team_memory_)),
        asked_(source.cut()),
        to_(state.place) {
    const int of_tokens = source.num_tokens * kTokenBytes;
    expected_ = unit.kept(2 * Base::kGroupBytes + (team_.is_one() ? of_tokens : 0));
    expected_tokens_ = unit.kept(team_.is_one() || team_.rank > 0 ? 0 : of_tokens);
    const uint8_t* const group = unit.lane == 0 ? source.groups[0] : source.groups[1];
    from_ = group + int64_t{source.first} * Base::kGroupBytes;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < this->places_ - 1; ++i) {
      fetch_weights(unit);
      advance(to_);
    }
  }

  // After wait_for_inputs().
  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, const FeedSource& source, Tokens& tokens) {
    team_.sync(unit);  // its barriers are there
    PieceCut cut = source.cut();
    int to = state_.place;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < this->places_ - 1; ++i) {
      fetch_tokens(unit, tokens, to, cut.take());
      advance(to);
    }
  }

  // Waits for the next place and asks for another one.
  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, Tokens& tokens) {
    const int place = state_.place;
    team_.sync(unit);  // all have read what the next copies replace
    const int pieces = fetch_weights(unit);
    fetch_tokens(unit, tokens, to_, pieces);
    advance(to_);
    this->weights = this->weights_in(place, 0);
    this->of_tokens = this->tokens_in(place);
    unit.barrier_wait(full_[place], state_.parity);
    if (!team_.is_one()) unit.barrier_wait(tokens_full_[place], state_.parity);
    advance(state_.place);
    if (state_.place == 0) state_.parity ^= 1;
  }

 private:
  static constexpr int kTokenBytes = TokenPlace<Base::kPiece.steps>::kPieceBytes;

  // Returns how many pieces are on their way to place `to_`, which may be none.
  template <class Unit>
  EFFINFER_DEVICE int fetch_weights(Unit& unit) {
    const int pieces = asked_.take();
    const int bytes = pieces * Base::kGroupBytes;
    if (unit.lane < 2 && pieces > 0) {
      if (unit.lane == 0) unit.barrier_arrive_expect(full_[to_], pieces * expected_);
      unit.copy_bulk(this->weights_in(to_, unit.lane), from_, bytes, full_[to_]);
    }
    from_ += bytes;
    return pieces;
  }

  template <class Unit>
  EFFINFER_DEVICE void fetch_tokens(Unit& unit, Tokens& tokens, int to, int pieces) {
    if (unit.lane == 0 && pieces * expected_tokens_ > 0) {
      unit.barrier_arrive_expect(tokens_full_[to], pieces * expected_tokens_);
    }
    tokens.fetch(unit, this->tokens_in(to), pieces, tokens_full_[to]);
  }

  FeedState& state_;
  const Team& team_;
  Mbarrier* const full_;
  Mbarrier* const tokens_full_;
  PieceCut asked_;
  int to_;               // place of the next copies
  int expected_;         // by the warp's barrier, in bytes for each piece
  int expected_tokens_;  // by the team's
  const uint8_t* from_;  // of the first two lanes, which have a group each
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

 public:
  using Tokens = LaneTokens<Base::kPiece.steps>;
  static constexpr int kTogether = 1;

  template <class Unit>
  EFFINFER_DEVICE LaneFeed(Unit& unit, const FeedSource& source, FeedState&)
      : Base(unit, source), team_(source.team), asked_(source.cut()) {
    const uint8_t* group = unit.lane < kWarp / 2 ? source.groups[0] : source.groups[1];
    from_ = group + int64_t{source.first} * Base::kGroupBytes + unit.lane % 16 * 16;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < this->places_ - 1; ++i) {
      fetch(unit);
      unit.commit();
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, const FeedSource& source, Tokens& tokens) {
    PieceCut cut = source.cut();
    EFFINFER_NO_UNROLL
    for (int place = 0; place < this->places_ - 1; ++place) {
      tokens.fetch_now(unit, this->tokens_in(place), cut.take());
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, Tokens& tokens) {
    this->weights = this->weights_in(place_, 0);
    this->of_tokens = this->tokens_in(place_);
    wait_for_oldest(unit, this->places_ - 1);
    team_.sync(unit);  // for all lanes, and all have read what the next copies replace
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

  const Team& team_;
  const uint8_t* from_;
  PieceCut asked_;
  int to_ = 0;
  int place_ = 0;
};

}  // namespace effinfer::cuda
