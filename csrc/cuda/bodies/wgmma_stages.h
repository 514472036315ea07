// The warpgroup that brings keys and values to those that multiply: which stages, and when.
//
// A step is 128 tokens of which something is visited: a stage of keys, then one of values. What the
// consumers must know of a step goes through a ring of its own.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/wgmma_pages.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kGroupWarps = 4;  // of a warpgroup
inline constexpr int kStepUnits = kStepTokens / kUnitTokens;

struct KeyStep {
  int32_t start;               // token of the sequence; -1: there is none
  uint64_t words[kStepUnits];  // visited tokens
};

// The stages of an item in their order. A warp walks together, and its lanes hold the page table.
template <class Unit>
class StageWalk {
 public:
  EFFINFER_DEVICE StageWalk(Unit& unit, const ItemUnits& item)
      : unit_(unit), item_(item), after_(ChunkWalk::first(unit, item)) {
    begin_chunk();
  }

  EFFINFER_DEVICE bool is_over() const { return now_.chunk() < 0; }
  EFFINFER_DEVICE bool of_values() const { return of_values_; }

  // Of a block of 32 tokens of the step: its page, -1 where nothing is visited.
  EFFINFER_DEVICE int32_t page_of(int block) const {
    const int at = kStepUnits * half_ + block / 2;
    const int32_t page = unit_.shfl(now_.page(), at);
    return (now_.units() >> at & 1) != 0 ? page : -1;
  }

  // True when another step begins, or all are over. The page table is asked for a chunk ahead.
  EFFINFER_DEVICE bool advance() {
    of_values_ = !of_values_;
    if (of_values_) return false;
    if (half_ == 0 && now_.units() >> kStepUnits != 0) {
      half_ = 1;
    } else {
      begin_chunk();
    }
    return true;
  }

  EFFINFER_DEVICE void store(KeyStep& to) const {
    const int at = unit_.lane - kStepUnits * half_;
    if (at >= 0 && at < kStepUnits) {
      to.words[at] = (now_.units() >> unit_.lane & 1) != 0 ? now_.word() : 0;
    }
    if (unit_.lane == 0) {
      to.start = is_over() ? -1 : now_.chunk() * kChunkTokens + half_ * kStepTokens;
    }
  }

 private:
  EFFINFER_DEVICE void begin_chunk() {
    now_ = after_;
    if (is_over()) return;
    after_ = now_.next(unit_, item_);
    half_ = (now_.units() & ((1u << kStepUnits) - 1)) != 0 ? 0 : 1;
  }

  Unit& unit_;
  const ItemUnits& item_;
  ChunkWalk now_;
  ChunkWalk after_;
  int half_ = 0;
  bool of_values_ = false;
};

// Shared: the rings of WgmmaAttentionShared.
template <class Unit, class Shared>
class StageProducer {
 public:
  using Tiles = typename Shared::Tiles;

  EFFINFER_DEVICE StageProducer(Unit& unit, const ops::AttentionProblem& p,
                                const ops::AttentionTile& tile, Shared& shared)
      : unit_(unit),
        shared_(shared),
        warp_(unit.shfl(unit.warp % kGroupWarps, 0)),
        tiles_(unit.lane, warp_, p, tile),
        walk_(unit, shared.units) {}

  // The loads of the next group are under way while one is stored, over the ends of stages too.
  EFFINFER_DEVICE void run() {
    publish();
    if (walk_.is_over()) return;
    Source now = source();
    load(now, 0);
    for (bool is_last = false; !is_last;) {
      Source next = now;
      EFFINFER_UNROLL
      for (int group = 0; group < Tiles::kGroups; ++group) {
        if (group + 1 < Tiles::kGroups) {
          load(now, group + 1);
        } else {
          if (walk_.advance()) publish();
          is_last = walk_.is_over();
          if (!is_last) {
            next = source();
            load(next, 0);
          }
        }
        if (group == 0) unit_.barrier_wait(shared_.empty[stage_.index], stage_.parity ^ 1);
        store(now, group);
      }
      unit_.fence_async();
      unit_.sync_warp();
      if (unit_.lane == 0) unit_.barrier_arrive(shared_.full[stage_.index]);
      stage_.next();
      now = next;
    }
  }

 private:
  static_assert(Tiles::kGroups % 2 == 0);  // of two places

  struct Source {
    const uint8_t* from;  // null: nothing is visited
    bool of_values;
  };

  EFFINFER_DEVICE Source source() {
    const int32_t page = walk_.page_of(warp_);
    const bool of_values = walk_.of_values();
    return {page < 0 ? nullptr : tiles_.begin(of_values, page), of_values};
  }

  EFFINFER_DEVICE void load(const Source& source, int group) {
    if (source.from == nullptr) return;
    Tiles::load(unit_, source.of_values, source.from, group, groups_[group % 2]);
  }
  // Keys that are not visited may be anything, as their scores are hidden; values are multiplied
  // with weights of zero.
  EFFINFER_DEVICE void store(const Source& source, int group) {
    uint8_t* const stage = shared_.ring[stage_.index];
    if (source.from != nullptr) {
      tiles_.store(source.of_values, groups_[group % 2], group, stage);
    } else if (source.of_values) {
      tiles_.store(true, typename Tiles::Group{}, group, stage);
    }
  }

  // Tells the consumers of the step that begins, or that all are over. The step whose place it
  // takes is done: the stage at hand has the place of values that came no earlier.
  EFFINFER_DEVICE void publish() {
    if (warp_ != 0) return;
    walk_.store(shared_.steps[step_.index]);
    // What other lanes have stored is there with the step's keys.
    if (unit_.lane == 0) unit_.barrier_arrive(shared_.step_full[step_.index]);
    step_.next();
  }

  Unit& unit_;
  Shared& shared_;
  const int warp_;  // of the warpgroup
  const Tiles tiles_;
  StageWalk<Unit> walk_;
  RingPlace<Shared::kStages> stage_;
  RingPlace<Shared::kSteps> step_;
  typename Tiles::Group groups_[2];
};

}  // namespace effinfer::cuda
