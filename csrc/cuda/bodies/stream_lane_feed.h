// A warp's places (stream_feed.h) by copies of 16 bytes of all lanes, on GPUs without bulk copies.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/bodies/stream_feed.h"
#include "cuda/bodies/stream_params.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// Copies of 16 bytes, divided among the lanes of the team.
template <int kSteps>
class LaneRows : public TokenRows<kSteps> {
  using Base = TokenRows<kSteps>;

 public:
  template <class Unit>
  EFFINFER_DEVICE LaneRows(const Unit& unit, const StreamParams& p, const FeedSource& source)
      : x_row_bytes_(p.x_row_bytes),
        row_bytes_(Base::row_bytes(source.shape)),
        count_(source.tokens.count) {
    constexpr int kQuadBits = std::bit_width(static_cast<unsigned>(Base::kPieceBytes / 16)) - 1;
    const int bits = kQuadBits + source.shape.hold_bits;  // of a row's 16 bytes
    const Team& team = source.team;
    at_ = (unit.lane & ((1 << bits) - 1)) * 16;
    own_row_ = unit.lane >> bits;
    first_ = (team.rank * kWarp >> bits) + own_row_;
    step_ = team.size * kWarp >> bits;
    from_ = p.x + source.tokens.first * x_row_bytes_ + source.cut.first * Base::kPieceBytes + at_;
  }

  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, uint8_t* place, int pieces) {
    const bool is_there = at_ < pieces * Base::kPieceBytes;
    const int end = count_ + own_row_;  // as many rounds for all lanes
    EFFINFER_NO_UNROLL
    for (int token = first_; token < end; token += step_) {
      unit.copy_async_if(is_there && token < count_, place + token * row_bytes_ + at_,
                         from_ + token * x_row_bytes_);
    }
    from_ += pieces * Base::kPieceBytes;
  }

  // The same at once: a copy on its way is waited for with all that were before it.
  template <class Unit>
  EFFINFER_DEVICE void fetch_now(Unit& unit, uint8_t* place, int pieces) {
    if (at_ < pieces * Base::kPieceBytes) {
      EFFINFER_NO_UNROLL
      for (int token = first_; token < count_; token += step_) {
        *reinterpret_cast<Quad*>(place + token * row_bytes_ + at_) =
            unit.load_written(reinterpret_cast<const Quad*>(from_ + token * x_row_bytes_));
      }
    }
    from_ += pieces * Base::kPieceBytes;
  }

 private:
  const uint8_t* from_;  // the lane's 16 bytes in the next place's k of the first token
  int64_t x_row_bytes_;
  int row_bytes_;
  int count_;
  int at_;  // of the lane's 16 bytes in a row
  int own_row_;
  int first_;
  int step_;
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
  using Base::cut_;

 public:
  using Tokens = LaneRows<Base::kPiece.steps>;
  static constexpr int kTogether = 1;

  template <class Unit>
  EFFINFER_DEVICE LaneFeed(Unit& unit, const FeedSource& source, int token_place)
      : Base(unit, source, token_place),
        team_(source.team),
        from_(source.groups.of(unit.lane) + int64_t{cut_.first} * Base::kGroupBytes +
              unit.lane % 16 * 16),
        count_(cut_.places()),
        places_(unit.kept(source.shape.places)) {}

  template <class Unit>
  EFFINFER_DEVICE void start_weights(Unit& unit, const Tokens&) {
    EFFINFER_NO_UNROLL
    for (int i = 0; i < places_ - 1; ++i) {
      fetch(unit);
      unit.commit();
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit, Tokens& tokens) {
    EFFINFER_NO_UNROLL
    for (int place = 0; place < places_ - 1; ++place) {
      tokens.fetch_now(unit, this->tokens_in(place), pieces_of(place));
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void next(Unit& unit, Tokens& tokens, int) {
    this->weights = this->weights_in(place_, 0);
    this->of_tokens = this->tokens_in(place_);
    wait_for_oldest(unit, places_ - 1);
    team_.sync(unit);  // for all lanes, and all have read what the next copies replace
    uint8_t* const to = this->tokens_in(to_);
    tokens.fetch(unit, to, fetch(unit));
    unit.commit();
    advance(place_);
  }

  template <class Unit>
  EFFINFER_DEVICE void release(Unit&, Tokens&, int) {}

  EFFINFER_DEVICE int count() const { return count_; }

 private:
  EFFINFER_DEVICE void advance(int& place) const {
    if (++place == places_) place = 0;
  }
  // None behind the last place.
  EFFINFER_DEVICE int pieces_of(int place) const {
    return place < count_ ? cut_.place(place).count : 0;
  }

  // Half of the lanes have a group. Returns how many pieces are on their way.
  template <class Unit>
  EFFINFER_DEVICE int fetch(Unit& unit) {
    const int pieces = pieces_of(asked_++);
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
  const int count_;  // of places
  const int places_;
  int asked_ = 0;  // of them
  int to_ = 0;
  int place_ = 0;
};

}  // namespace effinfer::cuda
