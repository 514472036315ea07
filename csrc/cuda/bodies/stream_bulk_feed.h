// A warp's places (stream_feed.h) by bulk copies, on Hopper.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/bodies/stream_feed.h"
#include "cuda/bodies/stream_params.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

inline constexpr int kBulkPlaces = 2;
static_assert(kTeamBarriers + kBulkPlaces * sizeof(Mbarrier) <= kBarrierBytes);

// Of bulk copies, before the feed of a warp or of a team. The first lane asks for weights; others
// meet it before they do anything with the barriers (start_tokens()).
template <class Unit>
EFFINFER_DEVICE void init_barriers(Unit& unit, uint8_t* memory) {
  if (unit.lane == 0) {
    EFFINFER_UNROLL
    for (int i = 0; i < kBulkPlaces; ++i) {
      unit.barrier_init(reinterpret_cast<Mbarrier*>(memory)[i], 1);
    }
  }
  unit.fence_async();
}

// Of up to 8 tokens a copy each: lane i of a warp has token i * size + rank of its team's.
template <int kSteps>
class BulkRows : public TokenRows<kSteps> {
  using Base = TokenRows<kSteps>;

 public:
  template <class Unit>
  EFFINFER_DEVICE BulkRows(Unit& unit, const StreamParams& p, const FeedSource& source)
      : token_(unit.lane * source.team.size + source.team.rank),
        is_there_(token_ < source.tokens.count),
        from_(unit.kept(p.x + (source.tokens.first + token_) * p.x_row_bytes)),
        to_(unit.kept(Base::at(source.shape, token_))),
        piece_bytes_(source.tokens.count * Base::kPieceBytes) {}

  // Of all tokens.
  EFFINFER_DEVICE int piece_bytes() const { return piece_bytes_; }

  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, uint8_t* place, const PieceRun& run, Mbarrier& full) {
    if (!is_there_) return;
    unit.copy_bulk(place + to_, from_ + run.first * Base::kPieceBytes,
                   run.count * Base::kPieceBytes, full);
  }

 private:
  int token_;
  bool is_there_;
  const uint8_t* from_;
  int to_;
  int piece_bytes_;
};

// Of more tokens a box for each piece: lane i of a warp has piece i * size + rank of a place.
template <int kSteps, int kTiles>
class BulkBoxes : public TokenBoxes<kSteps, kTiles> {
  using Base = TokenBoxes<kSteps, kTiles>;

 public:
  template <class Unit>
  EFFINFER_DEVICE BulkBoxes(const Unit& unit, const StreamParams&, const FeedSource& source)
      : piece_(unit.lane * source.team.size + source.team.rank),
        first_token_(source.tokens.first),
        map_(*source.tokens.map) {}

  EFFINFER_DEVICE int piece_bytes() const { return Base::kPieceBytes; }

  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, uint8_t* place, const PieceRun& run, Mbarrier& full) {
    if (piece_ >= run.count) return;
    unit.copy_tile(place + piece_ * Base::kPieceBytes, map_, (run.first + piece_) * kSteps * 16,
                   first_token_, full);
  }

 private:
  int piece_;
  int first_token_;
  const TensorMap& map_;
};

// Bulk copies of whole places. The first lane copies the weights of both row groups, which
// the warp's barrier hears of; those that have copied a place's tokens tell the team's, which
// for one warp is the same.
template <ops::PackedFormat kFormat, int kTiles>
class BulkFeed : public Feed<kFormat> {
  using Base = Feed<kFormat>;
  using Base::cut_;

 public:
  static constexpr int kSteps = Base::kPiece.steps;
  using Tokens = std::conditional_t<kTiles == 1, BulkRows<kSteps>, BulkBoxes<kSteps, kTiles>>;
  static constexpr int kTogether = 2;  // pieces that are multiplied as one, where that pays

  template <class Unit>
  EFFINFER_DEVICE BulkFeed(Unit& unit, const FeedSource& source, int token_place)
      : Base(unit, source, token_place),
        team_(source.team),
        full_(reinterpret_cast<Mbarrier*>(this->memory_)),
        tokens_full_(reinterpret_cast<Mbarrier*>(
            team_.is_one() ? this->memory_ : unit.kept_shared(source.team_barriers))),
        count_(unit.kept(cut_.places())),
        groups_(source.groups) {}

  // Asks for weights of the first places, as many as there are.
  template <class Unit>
  EFFINFER_DEVICE void start_weights(Unit& unit, const Tokens& tokens) {
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kBulkPlaces && i < count_; ++i) {
      fetch_weights(unit, tokens, i, cut_.place(i));
    }
  }

  // After wait_for_inputs().
  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, Tokens& tokens) {
    team_.sync(unit);  // its barriers are there
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kBulkPlaces && i < count_; ++i) {
      fetch_tokens(unit, tokens, i, cut_.place(i));
    }
  }

  // Waits for place `index` of the slice.
  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, Tokens&, int index) {
    const int place = index % kBulkPlaces;
    const int parity = index / kBulkPlaces % 2;
    this->weights = this->weights_in(place, 0);
    this->of_tokens = this->tokens_in(place);
    unit.barrier_wait(full_[place], parity);
    if (!team_.is_one()) unit.barrier_wait(tokens_full_[place], parity);
  }

  // It is multiplied, and others come to where it was, if there are any.
  template <class Unit>
  EFFINFER_DEVICE void release(Unit& unit, Tokens& tokens, int index) {
    if (index + kBulkPlaces >= count_) return;
    team_.sync(unit);  // all have read what the next copies replace
    const PieceRun run = cut_.place(index + kBulkPlaces);
    fetch_weights(unit, tokens, index % kBulkPlaces, run);
    fetch_tokens(unit, tokens, index % kBulkPlaces, run);
  }

  EFFINFER_DEVICE int count() const { return count_; }

 private:
  template <class Unit>
  EFFINFER_DEVICE void fetch_weights(Unit& unit, const Tokens& tokens, int place,
                                     const PieceRun& run) {
    if (unit.lane != 0) return;
    const int of_all = 2 * Base::kGroupBytes + (team_.is_one() ? tokens.piece_bytes() : 0);
    unit.barrier_arrive_expect(full_[place], run.count * of_all);
    const uint8_t* from = groups_.first + int64_t{run.first} * Base::kGroupBytes;
    EFFINFER_UNROLL
    for (int half = 0; half < 2; ++half) {
      unit.copy_bulk(this->weights_in(place, half), from, run.count * Base::kGroupBytes,
                     full_[place]);
      from += groups_.second;
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void fetch_tokens(Unit& unit, Tokens& tokens, int place, const PieceRun& run) {
    if (!team_.is_one() && team_.rank == 0 && unit.lane == 0) {
      unit.barrier_arrive_expect(tokens_full_[place], run.count * tokens.piece_bytes());
    }
    tokens.fetch(unit, this->tokens_in(place), run, tokens_full_[place]);
  }

  const Team& team_;
  Mbarrier* const full_;
  Mbarrier* const tokens_full_;
  const int count_;  // of places
  const RowGroups groups_;
};

}  // namespace effinfer::cuda
