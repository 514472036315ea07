// How the activations of a place (stream_feed.h) come to the warps that share them.
#pragma once

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

// What a lane copies of the activations of tokens x[0 .. count), 16 bytes of a piece of a token at
// a time, and what it multiplies: four k of a token in each step.
template <int kSteps>
class TokenCopies {
 public:
  static constexpr int kBytes = kSteps * 32;  // of a token in a piece

  // Of pieces from `first` on, of tokens that lie `piece_bytes` apart.
  template <class Unit>
  EFFINFER_DEVICE TokenCopies(const Unit& unit, const Team& team, const FeedShape& shape,
                              const uint8_t* x, int64_t row_bytes, int count, int first,
                              int piece_bytes)
      : from_(x + first * kBytes + unit.lane % kQuads * 16),
        row_bytes_(row_bytes),
        piece_bytes_(piece_bytes),
        hold_bits_(shape.hold_bits),
        begin_(team.rank * kPairs + unit.lane / kQuads),
        step_(team.size * kPairs),
        end_(count << shape.hold_bits),
        quad_(unit.lane % kQuads) {}

  // Puts those of the next `pieces` on their way. Pairs of a token and a piece are divided among
  // the lanes of the team.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, uint8_t* tokens, int pieces) {
    const int rounds_end = end_ + unit.lane / kQuads;  // as many rounds for all lanes
    EFFINFER_NO_UNROLL
    for (int pair = begin_; pair < rounds_end; pair += step_) {
      const int token = pair >> hold_bits_;
      const int piece = pair & ((1 << hold_bits_) - 1);
      unit.copy_async_if(pair < end_ && piece < pieces, tokens + place_of(token, piece),
                         from_ + token * row_bytes_ + piece * kBytes);
    }
    from_ += pieces * kBytes;
  }

  // The same at once: a copy on its way is waited for with all that were before it.
  template <class Unit>
  EFFINFER_DEVICE void fetch_now(Unit& unit, uint8_t* tokens, int pieces) {
    EFFINFER_NO_UNROLL
    for (int pair = begin_; pair < end_; pair += step_) {
      const int token = pair >> hold_bits_;
      const int piece = pair & ((1 << hold_bits_) - 1);
      if (piece >= pieces) continue;
      *reinterpret_cast<Quad*>(tokens + place_of(token, piece)) = unit.load_written(
          reinterpret_cast<const Quad*>(from_ + token * row_bytes_ + piece * kBytes));
    }
    from_ += pieces * kBytes;
  }

  // How the steps of a token are moved about.
  EFFINFER_DEVICE static int turn(int token) { return kSteps == 4 ? token % 4 : token / 2 % 2; }

 private:
  static constexpr int kQuads = kBytes / 16;
  static constexpr int kPairs = kWarp / kQuads;  // of a warp's round

  EFFINFER_DEVICE int place_of(int token, int piece) const {
    return piece * piece_bytes_ + token * kBytes + (quad_ / 2 ^ turn(token)) * 32 + quad_ % 2 * 16;
  }

  const uint8_t* from_;  // in the next place's k of the first token
  int64_t row_bytes_;
  int piece_bytes_;
  int hold_bits_;
  int begin_;
  int step_;
  int end_;
  int quad_;
};

}  // namespace effinfer::cuda
