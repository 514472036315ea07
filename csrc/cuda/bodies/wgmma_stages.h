// What brings keys and values to the warpgroups that multiply: which stages, and when. It is a
// warpgroup that re-arranges pages on their way, or a warp that asks for copies of pages that are
// re-arranged already.
//
// What the consumers must know of a step (bodies/stage_walk.h) goes through a ring of its own. Both
// rings go on from item to item: the first stages of one come while the one before ends.
#pragma once

#include <cstdint>

#include "cuda/bodies/stage_walk.h"
#include "cuda/bodies/wgmma_pages.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kGroupWarps = 4;  // of a warpgroup
inline constexpr int kItemPlaces = 2;  // for the item at hand, and the next one

// Where the rings go on, which follows from the stages and items so far: of a step's two stages
// that of values is at hand when the next step begins, or its keys are next, and an item's end is
// told as a step is.
template <class Shared>
struct RingPlaces {
  uint32_t stages = 0;
  uint32_t items = 0;
  EFFINFER_DEVICE RingPlace<Shared::kStages> stage() const { return {stages}; }
  EFFINFER_DEVICE RingPlace<Shared::kSteps> step() const { return {(stages + 1) / 2 + items}; }
  EFFINFER_DEVICE RingPlace<kItemPlaces> item() const { return {items}; }
};

// Of an item's pages as they lie. Shared: the rings of WgmmaAttentionShared.
template <class Unit, class Shared>
class StageProducer {
 public:
  using Tiles = typename Shared::Tiles;

  EFFINFER_DEVICE StageProducer(Unit& unit, const ops::AttentionProblem& p,
                                const typename Shared::Item& item, RingPlaces<Shared>& at,
                                Shared& shared)
      : unit_(unit),
        shared_(shared),
        warp_(unit.shfl(unit.warp % kGroupWarps, 0)),
        tiles_(unit.lane, warp_, p, item.tile.kv_head),
        walk_(unit, item.units, item.rule),
        at_(at) {}

  // The loads of the next group are under way while one is stored, over the ends of stages too.
  EFFINFER_DEVICE void run() {
    walk_.begin_step();
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
          if (walk_.of_values()) {
            walk_.begin_step();
            publish();
          } else {
            walk_.begin_values();
          }
          is_last = walk_.is_over();
          if (!is_last) {
            next = source();
            load(next, 0);
          }
        }
        if (group == 0)
          unit_.barrier_wait(shared_.empty[at_.stage().index()], at_.stage().parity() ^ 1);
        store(now, group);
      }
      unit_.fence_async();
      unit_.sync_warp();
      if (unit_.lane == 0) unit_.barrier_arrive(shared_.full[at_.stage().index()]);
      ++at_.stages;
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
    uint8_t* const stage = shared_.ring[at_.stage().index()];
    if (source.from != nullptr) {
      tiles_.store(source.of_values, groups_[group % 2], group, stage);
    } else if (source.of_values) {
      tiles_.store(true, typename Tiles::Group{}, group, stage);
    }
  }

  // Tells the consumers of the step that begins, or that all are over. What had its place is done
  // (see kSteps).
  EFFINFER_DEVICE void publish() {
    if (warp_ != 0) return;
    walk_.store(shared_.steps[at_.step().index()]);
    // What other lanes have stored is there with the step's keys.
    if (unit_.lane == 0) unit_.barrier_arrive(shared_.step_full[at_.step().index()]);
  }

  Unit& unit_;
  Shared& shared_;
  const int warp_;  // of the warpgroup
  const Tiles tiles_;
  StageWalk<Unit, true> walk_;
  RingPlaces<Shared>& at_;
  typename Tiles::Group groups_[2];
};

// Of an item's pages that are re-arranged, by one warp.
template <class Unit, class Shared>
class StageCopies {
 public:
  using Tiles = typename Shared::Tiles;

  EFFINFER_DEVICE StageCopies(Unit& unit, const ops::AttentionProblem& p,
                              const typename Shared::Item& item, RingPlaces<Shared>& at,
                              Shared& shared)
      : unit_(unit),
        shared_(shared),
        unit_zero_(p.arranged + int64_t{item.tile.arranged} * (2 * Tiles::kPageBytes)),
        walk_(unit, item.units, item.rule),
        at_(at) {}

  EFFINFER_DEVICE void run() {
    for (;;) {
      walk_.begin_step();
      publish();
      if (walk_.is_over()) return;
      copy_stage();
      walk_.begin_values();
      copy_stage();
    }
  }

 private:
  static_assert(kStepUnits == 2);

  EFFINFER_DEVICE const uint8_t* page_of(int32_t unit) const {
    return unit_zero_ + int64_t{unit} * (2 * Tiles::kPageBytes);
  }

  // As StageProducer's.
  EFFINFER_DEVICE void publish() {
    walk_.store(shared_.steps[at_.step().index()]);
    if (unit_.lane == 0) unit_.barrier_arrive(shared_.step_full[at_.step().index()]);
  }

  EFFINFER_DEVICE void copy_stage() {
    unit_.barrier_wait(shared_.empty[at_.stage().index()], at_.stage().parity() ^ 1);
    unit_.sync_warp();  // nobody still waits when the phase after that one begins
    Mbarrier& full = shared_.full[at_.stage().index()];
    if (unit_.lane == 0) {
      if (walk_.of_values()) {
        copy_values(full);
      } else {
        copy_keys(full);
      }
    } else if (unit_.lane < kGroupWarps) {
      unit_.barrier_arrive(full);  // for the other warps
    }
    ++at_.stages;
  }

  // Of units that are not visited the stage keeps what it has: their scores are hidden.
  EFFINFER_DEVICE void copy_keys(Mbarrier& full) {
    constexpr int kHalf = Tiles::kKeyTile / 2;
    const bool both = walk_.unit_of(0) >= 0 && walk_.unit_of(1) >= 0;
    unit_.barrier_arrive_expect(full, both ? 2 * Tiles::kPageBytes : Tiles::kPageBytes);
    EFFINFER_UNROLL
    for (int i = 0; i < kStepUnits; ++i) {
      if (walk_.unit_of(i) < 0) continue;
      const uint8_t* from = page_of(walk_.unit_of(i));
      uint8_t* to = shared_.ring[at_.stage().index()] + i * kHalf;
      EFFINFER_UNROLL
      for (int tile = 0; tile < Tiles::kPageBytes / kHalf; ++tile) {
        unit_.copy_bulk(to + tile * Tiles::kKeyTile, from + tile * kHalf, kHalf, full);
      }
    }
  }

  // Values that are not visited are multiplied with weights of zero: those of the step's other unit
  // do, which are finite wherever the result is.
  EFFINFER_DEVICE void copy_values(Mbarrier& full) {
    static_assert(Tiles::kValueTile == Tiles::kPageBytes);
    unit_.barrier_arrive_expect(full, 2 * Tiles::kPageBytes);
    EFFINFER_UNROLL
    for (int i = 0; i < kStepUnits; ++i) {
      const int32_t own = walk_.unit_of(i);
      const uint8_t* from = page_of(own >= 0 ? own : walk_.unit_of(1 - i)) + Tiles::kPageBytes;
      unit_.copy_bulk(shared_.ring[at_.stage().index()] + i * Tiles::kValueTile, from,
                      Tiles::kPageBytes, full);
    }
  }

  Unit& unit_;
  Shared& shared_;
  const uint8_t* const unit_zero_;  // where unit 0 of the sequence would lie
  StageWalk<Unit, false> walk_;
  RingPlaces<Shared>& at_;
};

}  // namespace effinfer::cuda
