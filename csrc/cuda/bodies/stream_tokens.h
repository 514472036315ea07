// How the activations of a place (stream_feed.h) come to the warps that share them: [token][k], as
// they lie in memory, 32 bytes for each 16 k of the place's pieces. A row has 32 bytes more than
// those, so that the 32 lanes' reads of 8 bytes, of 8 tokens each, meet all banks evenly.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/unit.h"

namespace effinfer::cuda {

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
  const uint8_t* first;
  int64_t row_bytes;
  int count;
};

// Of the pieces of a format with `kSteps` steps of 16 k.
template <int kSteps>
struct TokenPlace {
  static constexpr int kPieceBytes = kSteps * 32;  // of a token

  EFFINFER_DEVICE static constexpr int row_bytes(const FeedShape& shape) {
    return (kPieceBytes << shape.hold_bits) + 32;
  }
};

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

// Copies of 16 bytes, divided among the lanes of the team.
template <int kSteps>
class LaneTokens {
  using Place = TokenPlace<kSteps>;

 public:
  template <class Unit>
  EFFINFER_DEVICE LaneTokens(const Unit& unit, const Team& team, const FeedShape& shape,
                             const StreamTokens& x, int first)
      : x_row_bytes_(x.row_bytes), row_bytes_(Place::row_bytes(shape)), count_(x.count) {
    constexpr int kQuadBits = std::bit_width(static_cast<unsigned>(Place::kPieceBytes / 16)) - 1;
    const int bits = kQuadBits + shape.hold_bits;  // of a row's 16 bytes
    at_ = (unit.lane & ((1 << bits) - 1)) * 16;
    own_row_ = unit.lane >> bits;
    first_ = (team.rank * kWarp >> bits) + own_row_;
    step_ = team.size * kWarp >> bits;
    from_ = x.first + first * Place::kPieceBytes + at_;
  }

  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, uint8_t* place, int pieces) {
    const bool is_there = at_ < pieces * Place::kPieceBytes;
    const int end = count_ + own_row_;  // as many rounds for all lanes
    EFFINFER_NO_UNROLL
    for (int token = first_; token < end; token += step_) {
      unit.copy_async_if(is_there && token < count_, place + token * row_bytes_ + at_,
                         from_ + token * x_row_bytes_);
    }
    from_ += pieces * Place::kPieceBytes;
  }

  // The same at once: a copy on its way is waited for with all that were before it.
  template <class Unit>
  EFFINFER_DEVICE void fetch_now(Unit& unit, uint8_t* place, int pieces) {
    if (at_ < pieces * Place::kPieceBytes) {
      EFFINFER_NO_UNROLL
      for (int token = first_; token < count_; token += step_) {
        *reinterpret_cast<Quad*>(place + token * row_bytes_ + at_) =
            unit.load_written(reinterpret_cast<const Quad*>(from_ + token * x_row_bytes_));
      }
    }
    from_ += pieces * Place::kPieceBytes;
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

}  // namespace effinfer::cuda
