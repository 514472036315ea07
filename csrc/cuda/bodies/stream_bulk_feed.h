// A warp's places (stream_feed.h) by bulk copies, on Hopper.
#pragma once

#include <cstdint>

#include "cuda/bodies/stream_feed.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

inline constexpr int kMostBulkPlaces = 3;

// Of bulk copies, once before all feeds of a warp or of a team.
template <class Unit>
EFFINFER_DEVICE void init_barriers(Unit& unit, uint8_t* memory, int places) {
  if (unit.lane == 0) {
    EFFINFER_UNROLL
    for (int i = 0; i < kMostBulkPlaces; ++i) {
      if (i < places) unit.barrier_init(reinterpret_cast<Mbarrier*>(memory)[i], 1);
    }
  }
  unit.fence_async();
  unit.sync_warp();
}

// Bulk copies, a token each: lane i of a warp has token i * size + rank of its team's.
template <int kSteps>
class BulkTokens {
  using Place = TokenPlace<kSteps>;

 public:
  // Of pieces from `first` on.
  template <class Unit>
  EFFINFER_DEVICE BulkTokens(const Unit& unit, const Team& team, const FeedShape& shape,
                             const StreamTokens& x, int first) {
    const int token = unit.lane * team.size + team.rank;
    is_there_ = token < x.count;
    from_ = x.first + token * x.row_bytes + first * Place::kPieceBytes;
    to_ = token * Place::row_bytes(shape);
  }

  // Puts those of the next `pieces` on their way.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, uint8_t* place, int pieces, Mbarrier& full) {
    const int bytes = pieces * Place::kPieceBytes;
    if (is_there_ && pieces > 0) unit.copy_bulk(place + to_, from_, bytes, full);
    from_ += bytes;
  }

 private:
  const uint8_t* from_;  // in the next place's k
  int to_;
  bool is_there_;
};

// Bulk copies of whole places. The first lane of each half copies the weights of its row group,
// which the warp's barrier hears of; those that have copied a place's tokens tell the team's, which
// for one warp is the same.
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
        tokens_full_(
            reinterpret_cast<Mbarrier*>(team_.is_one() ? this->memory_ : this->team_memory_)),
        asked_(source.cut()) {
    const int tokens_bytes = source.num_tokens * kTokenBytes;
    expected_ = unit.kept(2 * Base::kGroupBytes + (team_.is_one() ? tokens_bytes : 0));
    expected_tokens_ = unit.kept(team_.is_one() || team_.rank > 0 ? 0 : tokens_bytes);
    from_ = source.group + int64_t{source.first} * Base::kGroupBytes;
    int to = state_.place;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < this->places_; ++i) {
      fetch_weights(unit, to);
      advance(to);
    }
  }

  // After wait_for_inputs().
  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, const FeedSource& source, Tokens& tokens) {
    team_.sync(unit);  // its barriers are there
    PieceCut cut = source.cut();
    int to = state_.place;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < this->places_; ++i) {
      fetch_tokens(unit, tokens, to, cut.take());
      advance(to);
    }
  }

  // Waits for the next place.
  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, Tokens&) {
    const int place = state_.place;
    this->weights = this->weights_in(place, 0);
    this->of_tokens = this->tokens_in(place);
    unit.barrier_wait(full_[place], state_.parity);
    if (!team_.is_one()) unit.barrier_wait(tokens_full_[place], state_.parity);
  }

  // It is multiplied, and others come in its place, if there are any.
  template <class Unit>
  EFFINFER_DEVICE void release(Unit& unit, Tokens& tokens) {
    if (!asked_.is_over()) {
      team_.sync(unit);  // all have read what the next copies replace
      const int pieces = fetch_weights(unit, state_.place);
      fetch_tokens(unit, tokens, state_.place, pieces);
    }
    advance(state_.place);
    if (state_.place == 0) state_.parity ^= 1;
  }

 private:
  static constexpr int kTokenBytes = TokenPlace<Base::kPiece.steps>::kPieceBytes;
  static constexpr int kHalf = kWarp / 2;

  // Returns how many pieces are on their way to the place, which may be none.
  template <class Unit>
  EFFINFER_DEVICE int fetch_weights(Unit& unit, int to) {
    const int pieces = asked_.take();
    const int bytes = pieces * Base::kGroupBytes;
    if (unit.lane % kHalf == 0 && pieces > 0) {
      if (unit.lane == 0) unit.barrier_arrive_expect(full_[to], pieces * expected_);
      unit.copy_bulk(this->weights_in(to, unit.lane / kHalf), from_, bytes, full_[to]);
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
  int expected_;         // by the warp's barrier, in bytes for each piece
  int expected_tokens_;  // by the team's
  const uint8_t* from_;  // in the group of the lane's half
};

}  // namespace effinfer::cuda
