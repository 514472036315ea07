// Weights of the tiles of matmuls (tile_weights.h) on their way through shared memory: a ring of
// places, each warp's own. A place has some k of 32 rows:
//
//   pieces       [piece][lane] 16 bytes of quants, each lane's where tile_weights.h wants them
//   the others   of the first group, then of the second: high bits, scales and minima, which four
//                lanes share, and the f16 of the header that they are under
//
// Why not registers, when each lane multiplies what it has loaded? A warp waits for loads by the
// few counters that it has for them, and ptxas gives all superblocks under way the same one: the
// first of them is there when the last one is. Groups of asynchronous copies are counted.
#pragma once

#include <cstdint>

#include "cuda/bodies/dequant.h"
#include "cuda/bodies/weight_scales.h"
#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

inline constexpr int kPieceStep = kWarp * 16;  // bytes between the pieces of a lane

// Of a place, by the format of its weights.
struct PlaceLayout {
  int steps;    // of 16 k: a superblock, or of dense weights half of one
  int pieces;   // of quants, of a lane
  int shared;   // pieces of a group that lanes share
  int headers;  // pieces of its header

  constexpr int quant_bytes() const { return pieces * kWarp * 16; }
  constexpr int group_bytes() const { return (shared + headers) * 16; }
  constexpr int weight_bytes() const { return quant_bytes() + 2 * group_bytes(); }
};

constexpr PlaceLayout place_layout(const ops::PackedFormat& format) {
  if (format.scales == ops::ScaleKind::dense) return {2, 4, 0, 0};
  const int pieces = format.bits == ops::QuantBits::u8 ? 4 : 2;
  const int64_t quants = ops::quant_bytes(format.bits);
  const int64_t scales = (ops::min_offset(format) - quants) * (format.has_min ? 2 : 1);
  const bool is_super = format.scales == ops::ScaleKind::super;
  return {4, pieces, static_cast<int>(quants + scales) / 16 - pieces * kWarp / 2,
          !is_super        ? 0
          : format.has_min ? 4
                           : 2};
}

// As numbers, which device code may name.
template <ops::PackedFormat kFormat>
struct PlaceOf {
  static constexpr PlaceLayout kLayout = place_layout(kFormat);
  static constexpr int kSteps = kLayout.steps;
  static constexpr int kPieces = kLayout.pieces;
  static constexpr int kShared = kLayout.shared;
  static constexpr int kHeaders = kLayout.headers;
  static constexpr int kQuantBytes = kLayout.quant_bytes();
  static constexpr int kGroupBytes = kLayout.group_bytes();
  static constexpr int kWeightBytes = kLayout.weight_bytes();
};

// A lane's rows of the first line of high bits in a place, which all t share.
template <ops::PackedFormat kFormat>
EFFINFER_DEVICE const uint8_t* high_lines(const uint8_t* place, int lane) {
  using Of = PlaceOf<kFormat>;
  return place + Of::kQuantBytes + lane / 16 * Of::kGroupBytes + lane / 4 % 4 * 16;
}

// And its scales: scales.load(first block's, header's, more...).
template <ops::PackedFormat kFormat, class Scales, class... More>
EFFINFER_DEVICE void load_scales(const uint8_t* place, int lane, Scales& scales, More... more) {
  using Of = PlaceOf<kFormat>;
  constexpr int kHigh = static_cast<int>(ops::quant_bytes(kFormat.bits)) - Of::kPieces * 256;
  const int quad = lane / 4 % 4;
  const uint8_t* others = place + Of::kQuantBytes + lane / 16 * Of::kGroupBytes;
  scales.load(others + kHigh + quad * Scales::kRowBytes, others + Of::kShared * 16 + quad * 8,
              more...);
}

// What a lane copies of the weights of one place after the other, or of every kStride-th. Half of
// the lanes have a group.
template <ops::PackedFormat kFormat, class Pieces, int kStride = 1>
class WeightCopies {
 public:
  // Of row_group() `group`, from superblock (or half of one) `first` on.
  EFFINFER_DEVICE WeightCopies(const uint8_t* group, int64_t header_bytes, int64_t header_row,
                               int lane, int first)
      : next_(first), pieces_to_(Pieces::to(lane)) {
    const int mine = lane % 16;
    const uint8_t* const data = group + header_bytes + first * kBytes;
    pieces_ = data + Pieces::from(lane);
    shared_ = data + Of::kPieces * (16 * 16) + mine * 16;
    shared_to_ = Of::kQuantBytes + lane / 16 * Of::kGroupBytes + mine * 16;
    in_last_ = mine < kInLast;
    last_ = shared_ + (kRounds - 1) * 256;
    // Pieces of the header are the last of all. Each row of it has two, for 4 superblocks.
    const int of_header = mine - (kInLast - Of::kHeaders);
    in_header_ = Of::kHeaders > 0 && of_header >= 0;
    if (in_header_) {
      last_ = group + of_header / 2 * header_row + (first >> 2) * kHeaderBytes + of_header % 2 * 16;
    }
  }

  // Puts the next place on its way, if it exists.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, uint8_t* place, bool exists = true) {
    EFFINFER_UNROLL
    for (int i = 0; i < Of::kPieces; ++i) {
      unit.copy_async_if(exists, place + Pieces::to(i, pieces_to_), pieces_ + Pieces::next(i));
    }
    EFFINFER_UNROLL
    for (int round = 0; round + 1 < kRounds; ++round) {
      unit.copy_async_if(exists, place + shared_to_ + round * 256, shared_ + round * 256);
    }
    if constexpr (kRounds > 0) {
      unit.copy_async_if(exists && in_last_, place + shared_to_ + (kRounds - 1) * 256, last_);
    }
    next_ += kStride;
    pieces_ += kStride * kBytes;
    shared_ += kStride * kBytes;
    last_ += !in_header_ ? kStride * kBytes : next_ % 4 < kStride ? kHeaderBytes : 0;
  }

 private:
  using Of = PlaceOf<kFormat>;
  static constexpr int64_t kBytes = ops::superblock_bytes(kFormat) * Of::kSteps / 4;
  static constexpr int64_t kHeaderBytes = ops::kGroupRows * 2;
  // What lanes share goes in rounds of a piece each.
  static constexpr int kShared = Of::kShared + Of::kHeaders;
  static constexpr int kRounds = (kShared + 15) / 16;
  static constexpr int kInLast = kShared - (kRounds - 1) * 16;
  static_assert(Of::kHeaders <= kInLast || kRounds == 0);

  int next_;  // place of the weight
  const uint8_t* pieces_;
  const uint8_t* shared_;
  const uint8_t* last_;  // of the last round
  int pieces_to_;
  int shared_to_;
  bool in_last_;
  bool in_header_;
};

// A warp's weights, on their way through places of its own.
template <ops::PackedFormat kFormat, class Pieces, int kPlaces>
struct WeightRing {
  WeightCopies<kFormat, Pieces> copies;
  uint8_t (&places)[kPlaces][PlaceOf<kFormat>::kWeightBytes];
  int left;                 // places that have no copies yet
  int place = kPlaces - 1;  // that was read last

  // A group of copies, with what else the warp has copied since the last one.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, int to) {
    copies.fetch(unit, places[to], left-- > 0);
    unit.commit();
  }
  // What comes before the first place: kPlaces - 1 groups.
  template <class Unit>
  EFFINFER_DEVICE void start(Unit& unit) {
    EFFINFER_UNROLL
    for (int i = 0; i < kPlaces - 1; ++i) fetch(unit, i);
  }
  // The next place is there for the lanes that copied it.
  template <class Unit>
  EFFINFER_DEVICE void wait(Unit& unit) {
    unit.template wait<kPlaces - 2>();
  }
  // That place, after a barrier behind wait(): all have read what the next copies replace.
  template <class Unit>
  EFFINFER_DEVICE const uint8_t* advance(Unit& unit) {
    fetch(unit, place);
    if (++place == kPlaces) place = 0;
    return places[place];
  }
  template <class Unit>
  EFFINFER_DEVICE const uint8_t* next(Unit& unit) {
    wait(unit);
    unit.sync_warp();  // for all lanes
    return advance(unit);
  }
};

}  // namespace effinfer::cuda
