// A warp's blocks of keys and values on their way, in the order in which they are multiplied.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/attention_fetch.h"
#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/attention_shared.h"
#include "cuda/bodies/fragments.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// A ring of the warp's own, whose parts come without a barrier: of a pass each of the warp's blocks
// of tokens, column by column of dims, then all 8 blocks of its own dims of values. Where the ring
// has room for it two parts come at once, both halves of a page's values or two columns of keys,
// for what is done beside a part's products takes as long as these. Behind an odd last column there
// is nothing.
template <class Unit, DType kType, int kWarps>
class BlockRing {
 public:
  using Shared = AttentionShared<kType, kWarps>;
  using Slot = typename Fetch<kType>::Slot;
  static constexpr int kBlocks = Shared::kBlocks;
  static constexpr int kRing = Shared::Rings::kRing;
  static constexpr int kAtOnce = kRing == 8 && kWarps < 8 ? 2 : 1;
  static constexpr int kPlaces = kRing / kAtOnce;
  static constexpr int kAhead = kPlaces - 1;
  // Until the first parts have come. What the first time sends is nothing, but what is behind it.
  static constexpr int kFirst = kPlaces;

  EFFINFER_DEVICE BlockRing(Unit& unit, Shared& shared, const AttentionParams& params)
      : unit_(unit), shared_(shared), dims_(params.p.k.dims) {}

  // Of 32 dims.
  EFFINFER_DEVICE int columns() const { return (dims_ + kBlock - 1) / kBlock; }
  // take() so often for a block of keys, or the pass's values.
  EFFINFER_DEVICE int key_takes() const { return (columns() + kAtOnce - 1) / kAtOnce; }
  static constexpr int kValueTakes = kChunkBlocks / kAtOnce;

  // The next kAtOnce parts have come, and others are on their way to their predecessors' place. The
  // first kFirst times there are none.
  EFFINFER_DEVICE const Slot* take(const ChunkPass& now, const ChunkPass& next) {
    unit_.template wait<kAhead - 1>();
    unit_.sync_warp();  // of all lanes; and all have read what the next copies replace
    send(now, next);
    return place();  // all but one are ahead of it
  }

  // What was ahead in the next pass is ahead in the one at hand.
  EFFINFER_DEVICE void end_pass() { in_next_ = false; }

  // Of pages of int8: token t of the lane's 8 of one of the warp's blocks; 8 on of their values.
  // Behind what is visited they may be anything.
  EFFINFER_DEVICE float scale(int block, int t) const {
    return float_of(shared_.rings.scales[unit_.warp][block][t / 4][unit_.lane].words[t % 4]);
  }

 private:
  using Block = KvBlock<kType>;
  static constexpr int kLoads = Block::kLoads;
  static constexpr int kRuns = kBlocks + kChunkUnits;
  static constexpr int kMostDims = kWarps * kBlock;

  EFFINFER_DEVICE Slot* place() const { return &shared_.rings.slots[unit_.warp][kAtOnce * place_]; }
  EFFINFER_DEVICE bool of_values() const { return run_ >= kBlocks; }
  // Of a chunk's: the run's first block of tokens.
  EFFINFER_DEVICE int first_block() const {
    return of_values() ? 2 * (run_ - kBlocks) : unit_.warp * kBlocks + run_;
  }

  EFFINFER_DEVICE void send(const ChunkPass& now, const ChunkPass& next) {
    if (parts_.from != nullptr) {
      if (dims_ != kMostDims) {
        copy_parts(place());
      } else if (of_values()) {
        copy_whole<Block::kValueGroups * kMostDims * 4, Block::kValueStep>(place());
      } else {
        copy_whole<Block::kKeyLines * 64, kLoads>(place());
      }
    } else if (parts_.load_step == PartRun::kGathered) {
      gather_parts(in_next_ ? next : now, place());
    }
    unit_.commit();
    place_ = (place_ + 1) & (kPlaces - 1);
    left_ -= kAtOnce;
    if (left_ > 0) return;
    if (++run_ == kRuns) {
      run_ = 0;
      in_next_ = true;
    }
    begin_run(in_next_ ? next : now);
  }

  // Of heads as wide as the kernel takes: loads lie at constant distances.
  template <int kLoadStep, int kPartSteps>
  EFFINFER_DEVICE void copy_whole(Slot* to) {
    EFFINFER_UNROLL
    for (int part = 0; part < kAtOnce; ++part) {
      EFFINFER_UNROLL
      for (int l = 0; l < kLoads; ++l) {
        unit_.copy_async(&to[part][l][parts_.place],
                         parts_.from + (part * kPartSteps + l) * kLoadStep, true);
      }
    }
    parts_.from += kAtOnce * kPartSteps * kLoadStep;
  }

  EFFINFER_DEVICE void copy_parts(Slot* to) {
    // Of 16 dims each, that there are of keys from here on.
    const int steps = of_values() ? 2 * kAtOnce : 2 * left_ - (dims_ % kBlock == 0 ? 0 : 1);
    const int64_t next_part = parts_.load_step * (of_values() ? Block::kValueStep : kLoads);
    EFFINFER_UNROLL
    for (int part = 0; part < kAtOnce; ++part) {
      EFFINFER_UNROLL
      for (int l = 0; l < kLoads; ++l) {
        const uint8_t* from = parts_.from + l * parts_.load_step;
        const bool is_there = 2 * part + l / (kLoads / 2) < steps;
        unit_.copy_async_if(is_there, &to[part][l][parts_.place], from);
      }
      parts_.from += next_part;
    }
  }

  EFFINFER_DEVICE void gather_parts(const ChunkPass& pass, Slot* to) {
    EFFINFER_NO_UNROLL
    for (int part = 0; part < kAtOnce && part < left_; ++part) {
      const int index = first_block() + (of_values() ? 2 - left_ + part : 0);
      const int column = of_values() ? unit_.warp : columns() - left_ + part;
      shared_.fetch.gather(unit_, pass, of_values(), index, column, dims_, to[part]);
    }
  }

  EFFINFER_DEVICE void begin_run(const ChunkPass& pass) {
    const int at = first_block() / 2;
    const int32_t page = pass.pages[at];  // loads side by side
    const uint64_t path = pass.path;
    left_ = of_values() ? 2 : columns();
    parts_ = PartRun();
    if ((pass.units >> at & 1) == 0 || (of_values() && unit_.warp * kBlock >= dims_)) return;
    if constexpr (KvBlock<kType>::kScaled) {
      if (!of_values()) {
        shared_.fetch.fetch_scales(unit_, pass, first_block(),
                                   shared_.rings.scales[unit_.warp][run_]);
      }
    }
    if (path != 0 && shared_.fetch.is_in_tree(pass.chunk, at)) {
      parts_.load_step = PartRun::kGathered;
      return;
    }
    parts_ = of_values() ? shared_.fetch.values_of(unit_, page, unit_.warp, dims_)
                         : shared_.fetch.keys_of(unit_, page, first_block() % 2, dims_);
  }

  Unit& unit_;
  Shared& shared_;
  const int dims_;
  // The next parts to fetch: of the pass at hand, or already of the next one. A pass's runs are its
  // blocks of keys and pages of values.
  PartRun parts_;
  bool in_next_ = false;
  int place_ = kPlaces - 1;
  int run_ = -1;
  int left_ = 1;  // parts of the run
};

}  // namespace effinfer::cuda
