// Whole pages of keys and values on their way to a block, by Hopper's bulk copies.
//
// Each unit of a chunk has a place for its keys, and values come to 2 or 4 places in turn. They lie
// as in memory, but that values have 32 bytes more behind each 8 tokens:
//
//   keys    lane 4 c + q loads 16 bytes of line q on: eight lanes 32 bytes of four lines, so that
//           two lanes meet at a bank
//   values  of a row that is 8 q tokens on: without what lies between these, four would
//
// A barrier of a place tells when a page has come. Who asks for the next one must know that nobody
// reads the last one any more: of keys from the block's barrier behind all scores, of values from a
// second barrier of the place, at which each warp arrives that has multiplied them. A unit that is
// not visited has its turn, too, of no bytes.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/attention_fetch.h"
#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/attention_shared.h"
#include "cuda/bodies/fragments.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// Where pages lie from AttentionShared::rings on, in bytes.
template <DType kType>
struct PagePlaces {
  static constexpr int kPieces = 8;  // of a page of values, with a gap behind each
  static constexpr int kGap = 32;
  static constexpr int kTokenScales = kUnitTokens * 4;
  // Of a unit's keys, then of its values. Those of the next pass come while those of the one at
  // hand are still to be read.
  static constexpr int kUnitScales = KvBlock<kType>::kScaled ? 2 * kTokenScales : 0;
  static constexpr int kFirstKeys = 2 * kChunkUnits * kUnitScales;

  static constexpr int page(int dims) { return kUnitTokens * dims * 4 / KvBlock<kType>::P; }
  static constexpr int values(int dims) { return page(dims) + kPieces * kGap; }
  static constexpr int all(int dims, int value_places) {
    return kFirstKeys + kChunkUnits * page(dims) + value_places * values(dims);
  }
};

template <class Unit, DType kType, int kWarps>
class PageFeed {
  using Block = KvBlock<kType>;
  using Places = PagePlaces<kType>;
  static constexpr int kHalves = kWarps > 4 ? 1 : 2;  // of a unit, that a warp has scores of
  static constexpr int kPieceTokens = kUnitTokens / Places::kPieces;

 public:
  using Shared = AttentionShared<kType, kWarps>;
  static constexpr int kBlocks = Shared::kBlocks;

  EFFINFER_DEVICE PageFeed(Unit& unit, Shared& shared, const AttentionParams& params)
      : unit_(unit),
        shared_(shared),
        dims_(params.p.k.dims),
        places_(params.value_places),
        first_(reinterpret_cast<uint8_t*>(&shared.rings)) {}

  // Before a barrier of the block.
  EFFINFER_DEVICE void init() {
    if (unit_.warp != kWarps / 2 || unit_.lane != 0) return;
    EFFINFER_UNROLL
    for (int i = 0; i < kChunkUnits; ++i) {
      unit_.barrier_init(shared_.keys_full[i], 1);
      unit_.barrier_init(shared_.values_full[i], 1);
      unit_.barrier_init(shared_.values_read[i], kWarps);
    }
    unit_.fence_async();
  }

  // Asks for all that there are places for, of the first pass.
  EFFINFER_DEVICE void start(const ChunkPass& first) {
    ask_keys(first, 0);
    EFFINFER_NO_UNROLL
    for (int at = unit_.warp; at < places_; at += kWarps) {
      ask(first, 0, true, at, values_at(at), shared_.values_full[at]);
    }
  }

  // When all warps have multiplied the keys of the pass at hand.
  EFFINFER_DEVICE void ask_next_keys(const ChunkPass& next) {
    if (next.chunk >= 0) ask_keys(next, num_passes_ + 1);
  }

  // Waits for unit `at` of the pass, one of the warp's own. What the lane loads of its block `half`
  // begins at keys(); the next load is kKeyBytes on.
  static constexpr int kKeyBytes = Block::kKeyLines * 64;
  EFFINFER_DEVICE void take_keys(const ChunkPass& now, int at, bool may_gather) {
    unit_.barrier_wait(shared_.keys_full[at], num_passes_ & 1);
    if (may_gather && is_gathered(now, at)) gather(now, false, at, keys_at(at));
  }
  EFFINFER_DEVICE const uint8_t* keys(int at, int half) const {
    const int token = half * kBlock + 4 * Block::quad(unit_.lane);
    return keys_at(at) + Block::key_offset(token, Block::key_line(unit_.lane, 0), dims_);
  }

  // Waits for the values of unit `at`, one unit after the other. The lane's loads of 8 tokens are
  // load_bytes() apart, and those of a block tokens_bytes().
  EFFINFER_DEVICE const uint8_t* take_values(const ChunkPass& now, int at, bool may_gather) {
    unit_.barrier_wait(shared_.values_full[place_], parity_);
    uint8_t* const place = values_at(place_);
    if (may_gather && is_gathered(now, at)) gather(now, true, at, place);
    const int dim = Fetch<kType>::first_dim(unit_.lane, unit_.warp, dims_);
    return place + unit_.lane % 4 * piece_distance(dims_) + dim * 4;
  }
  static constexpr int load_bytes(int dims) { return dims * 4; }
  static constexpr int tokens_bytes(int dims) { return 4 * piece_distance(dims); }
  // Those of unit `at` have been multiplied. When all warps have, one of them asks for others to
  // their place.
  EFFINFER_DEVICE void end_values(const ChunkPass& now, const ChunkPass& next, int at) {
    unit_.sync_warp();  // all lanes have read them
    Mbarrier& read = shared_.values_read[place_];
    if (unit_.lane == 0) unit_.barrier_arrive(read);
    const int then = at + places_;
    const ChunkPass& pass = then < kChunkUnits ? now : next;
    if (unit_.warp == at % kWarps && pass.chunk >= 0) {
      unit_.barrier_wait(read, parity_);
      ask(pass, 0, true, then % kChunkUnits, values_at(place_), shared_.values_full[place_]);
    }
    if (++place_ < places_) return;
    place_ = 0;
    parity_ ^= 1;
  }

  EFFINFER_DEVICE void end_pass() { ++num_passes_; }

  // Token t of the lane's 8 of one of the warp's blocks; 8 on of their values. Behind what is
  // visited they may be anything.
  EFFINFER_DEVICE float scale(int block, int t) const {
    const int index = unit_.warp * kBlocks + block;
    const uint8_t* const unit = first_ + scales_at(num_passes_, index / 2) +
                                t / 8 * Places::kTokenScales +
                                (index % 2 * kBlock + unit_.lane % 4 * 8) * 4;
    return float_of(reinterpret_cast<const Quad*>(unit)[t % 8 / 4].words[t % 4]);
  }

 private:
  EFFINFER_DEVICE uint8_t* keys_at(int at) const {
    return first_ + Places::kFirstKeys + at * Places::page(dims_);
  }
  EFFINFER_DEVICE uint8_t* values_at(int place) const {
    return keys_at(kChunkUnits) + place * Places::values(dims_);
  }
  static constexpr int piece_distance(int dims) {
    return Places::page(dims) / Places::kPieces + Places::kGap;
  }
  EFFINFER_DEVICE static int scales_at(int pass, int at) {
    return (pass % 2 * kChunkUnits + at) * Places::kUnitScales;
  }

  // Each warp asks for those that it multiplies; of two that share a page the first.
  EFFINFER_DEVICE void ask_keys(const ChunkPass& pass, int number) {
    if (kWarps > kChunkUnits && unit_.warp % 2 != 0) return;
    EFFINFER_UNROLL
    for (int i = 0; i < (kChunkUnits + kWarps - 1) / kWarps; ++i) {
      const int at = unit_.warp * kChunkUnits / kWarps + i;
      ask(pass, number, false, at, keys_at(at), shared_.keys_full[at]);
    }
  }

  // Of pass `number`, of whose keys alone that matters. What is gathered is by who multiplies it.
  EFFINFER_DEVICE void ask(const ChunkPass& pass, int number, bool of_values, int at, uint8_t* to,
                           Mbarrier& full) {
    if (is_visited(pass, at) && !(pass.path != 0 && is_gathered(pass, at))) {
      copy(pass.pages[at], of_values, to, first_ + scales_at(number, at), full);
    } else if (unit_.lane == 0) {
      unit_.barrier_arrive(full);
    }
  }
  EFFINFER_DEVICE static bool is_visited(const ChunkPass& pass, int at) {
    return (pass.units >> at & 1) != 0;
  }
  // In a pass with a path.
  EFFINFER_DEVICE bool is_gathered(const ChunkPass& pass, int at) const {
    return is_visited(pass, at) && shared_.fetch.is_in_tree(pass.chunk, at);
  }

  // Scales of both come with keys.
  EFFINFER_DEVICE void copy(int32_t page, bool of_values, uint8_t* to, uint8_t* scales,
                            Mbarrier& full) {
    const Fetch<kType>& fetch = shared_.fetch;
    const int pieces = of_values ? Places::kPieces : 1;
    const int bytes = of_values ? Places::page(dims_) / Places::kPieces : Places::page(dims_);
    if (unit_.lane == 0) {
      const int with = of_values ? 0 : Places::kUnitScales;
      unit_.barrier_arrive_expect(full, Places::page(dims_) + with);
    }
    if (unit_.lane < pieces) {
      const uint8_t* const from = of_values ? fetch.value_page(page) : fetch.key_page(page);
      unit_.copy_bulk(to + unit_.lane * (bytes + Places::kGap), from + unit_.lane * bytes, bytes,
                      full);
    }
    if constexpr (Block::kScaled) {
      if (of_values || unit_.lane >= 2) return;
      const float* const from = unit_.lane == 0
                                    ? fetch.key_scales + page * fetch.key_scale_stride
                                    : fetch.value_scales + page * fetch.value_scale_stride;
      unit_.copy_bulk(scales + unit_.lane * Places::kTokenScales, from, Places::kTokenScales, full);
    }
  }

  // What a displaced row has in places of unit `at`: the warp's tokens of keys, or its dims.
  EFFINFER_DEVICE void gather(const ChunkPass& pass, bool of_values, int at, uint8_t* to) {
    constexpr int kGroups = kUnitTokens / Block::P;
    const int first = kBlocks == 1 ? unit_.warp % 2 : 0;  // of the unit's halves
    const int dim = unit_.warp * kBlock + unit_.lane;
    const int count = of_values ? (dim < dims_ ? kGroups : 0) : kHalves * (dims_ / Block::P);
    EFFINFER_NO_UNROLL
    for (int n = 0; n < count; ++n) {
      const int token = of_values ? n * Block::P : (first + n % kHalves) * kBlock + unit_.lane;
      const int line_or_dim = of_values ? dim : n / kHalves;
      const int offset =
          of_values ? Block::value_offset(n, dim, dims_) + token / kPieceTokens * Places::kGap
                    : Block::key_offset(token, line_or_dim, dims_);
      *reinterpret_cast<uint32_t*>(to + offset) = shared_.fetch.gathered(
          unit_, pass, of_values, at * kUnitTokens + token, line_or_dim, dims_);
    }
    if constexpr (Block::kScaled) {
      auto* const scales = reinterpret_cast<float*>(first_ + scales_at(num_passes_, at));
      for (int half = first; !of_values && half < first + kHalves; ++half) {
        shared_.fetch.gather_scale(unit_, pass, at, half * kBlock + unit_.lane, scales);
      }
    }
    unit_.fence_async();  // copies come to the same place later
    unit_.sync_warp();
  }

  Unit& unit_;
  Shared& shared_;
  const int dims_;
  const int places_;  // of values
  uint8_t* const first_;
  int num_passes_ = 0;  // that are over
  int place_ = 0;       // of the next values
  int parity_ = 0;      // of their turn
};

}  // namespace effinfer::cuda
