// What brings keys and values to the warpgroups that multiply: which stages, and when. It is a
// warpgroup that re-arranges pages on their way, or a warp that asks for copies of pages that are
// re-arranged already.
//
// A step is two units of 64 tokens: a stage of keys, then one of values. Units that a list has are
// paired in their order from each segment's start on, so that lists of few units have few steps;
// without a list units 2 i and 2 i + 1 are a pair. Which ones are depends neither on the item nor
// on the rows beside, and pairs of which the item visits nothing are left out. What the consumers
// must know of a step goes through a ring of its own.
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
  int32_t starts[kStepUnits];  // tokens of the sequence, in one segment; the first -1: no step
  uint64_t words[kStepUnits];  // visited tokens
};

// The stages of an item in their order. A warp walks together, a lane a unit of a segment.
template <class Unit>
class StageWalk {
 public:
  EFFINFER_DEVICE StageWalk(Unit& unit, const ItemUnits& item) : unit_(unit), item_(item) {
    after_ = find(item.first / kWarp);
    begin_segment();
    begin_step();
  }

  EFFINFER_DEVICE bool is_over() const { return now_.index < 0; }
  EFFINFER_DEVICE bool of_values() const { return of_values_; }

  // Of a block of 32 tokens of the step: its page, -1 where nothing is visited.
  EFFINFER_DEVICE int32_t page_of(int block) const {
    const int32_t page = unit_.shfl(now_.page, block / 2 == 0 ? first_ : second_);
    return unit_of(block / 2) >= 0 ? page : -1;
  }
  // Unit `index` of the step, -1 where nothing of it is visited.
  EFFINFER_DEVICE int32_t unit_of(int index) const {
    const int at = index == 0 ? first_ : second_;
    if (index == 1 && second_ == first_) return -1;
    return (now_.visited >> at & 1) != 0 ? now_.index * kWarp + at : -1;
  }

  // True when another step begins, or all are over.
  EFFINFER_DEVICE bool advance() {
    of_values_ = !of_values_;
    if (of_values_) return false;
    begin_step();
    return true;
  }

  EFFINFER_DEVICE void store(KeyStep& to) const {
    const uint64_t word = (now_.visited >> unit_.lane & 1) != 0 ? now_.word : 0;
    if (unit_.lane == second_) to.words[1] = second_ == first_ ? 0 : word;
    if (unit_.lane == first_) to.words[0] = word;
    if (unit_.lane != 0) return;
    to.starts[0] = is_over() ? -1 : start_of(first_);
    to.starts[1] = start_of(second_);
  }

 private:
  static_assert(kStepUnits == 2 && ops::kSegmentUnits == kWarp);

  struct Segment {
    int32_t index = -1;    // of the sequence; -1: there is none
    uint32_t listed = 0;   // a bit for each unit before the item's end that is in no step yet
    uint32_t visited = 0;  // those that the item visits
    int32_t page = 0;      // of unit `lane`
    uint64_t word = 0;
  };

  EFFINFER_DEVICE int32_t start_of(int at) const { return (now_.index * kWarp + at) * kUnitTokens; }

  // The next one from `index` on of which something is visited.
  EFFINFER_DEVICE Segment find(int32_t index) const {
    Segment segment;
    for (; index * kWarp < item_.end; ++index) {
      const int32_t at = index * kWarp + unit_.lane;
      uint64_t word = at < item_.end ? ~uint64_t{0} : 0;
      if (word != 0 && item_.words != nullptr) word = unit_.load(item_.words + at);
      const bool visits = word != 0 && is_visited(item_, at);
      const uint32_t visited = unit_.ballot(visits);
      if (visited == 0) continue;
      segment.index = index;
      segment.listed = unit_.ballot(word != 0);
      segment.visited = visited;
      segment.word = word;
      if (visits) segment.page = unit_.load(item_.pages + at);
      break;
    }
    return segment;
  }

  // The page table is asked for a segment ahead.
  EFFINFER_DEVICE void begin_segment() {
    now_ = after_;
    if (!is_over()) after_ = find(now_.index + 1);
  }

  EFFINFER_DEVICE void begin_step() {
    while (!is_over()) {
      while (take(first_)) {
        second_ = first_;
        take(second_);
        if (((now_.visited >> first_ | now_.visited >> second_) & 1) != 0) return;
      }
      begin_segment();
    }
  }
  // The segment's next listed unit, where there is one.
  EFFINFER_DEVICE bool take(int& at) {
    if (now_.listed == 0) return false;
    at = unit_.lowest_bit(now_.listed);
    now_.listed &= now_.listed - 1;
    return true;
  }

  Unit& unit_;
  const ItemUnits& item_;
  Segment now_;
  Segment after_;
  int first_ = 0;   // units of the step, of the segment
  int second_ = 0;  // the same as the first one: there is none
  bool of_values_ = false;
};

// Of pages as they lie. Shared: the rings of WgmmaAttentionShared.
template <class Unit, class Shared>
class StageProducer {
 public:
  using Tiles = typename Shared::Tiles;

  EFFINFER_DEVICE StageProducer(Unit& unit, const ops::AttentionProblem& p,
                                const ops::AttentionTile& tile, Shared& shared)
      : unit_(unit),
        shared_(shared),
        warp_(unit.shfl(unit.warp % kGroupWarps, 0)),
        tiles_(unit.lane, warp_, p, tile.kv_head),
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

// Of pages that are re-arranged, by one warp.
template <class Unit, class Shared>
class StageCopies {
 public:
  using Tiles = typename Shared::Tiles;

  EFFINFER_DEVICE StageCopies(Unit& unit, const ops::AttentionProblem& p,
                              const ops::AttentionTile& tile, Shared& shared)
      : unit_(unit),
        shared_(shared),
        unit_zero_(p.arranged + int64_t{tile.arranged} * (2 * Tiles::kPageBytes)),
        walk_(unit, shared.units) {}

  EFFINFER_DEVICE void run() {
    publish();
    while (!walk_.is_over()) {
      unit_.barrier_wait(shared_.empty[stage_.index], stage_.parity ^ 1);
      unit_.sync_warp();  // nobody still waits when the phase after that one begins
      if (unit_.lane == 0) copy();
      stage_.next();
      if (walk_.advance()) publish();
    }
  }

 private:
  static_assert(kStepUnits == 2);

  EFFINFER_DEVICE const uint8_t* page_of(int32_t unit) const {
    return unit_zero_ + int64_t{unit} * (2 * Tiles::kPageBytes);
  }

  // As StageProducer's.
  EFFINFER_DEVICE void publish() {
    walk_.store(shared_.steps[step_.index]);
    if (unit_.lane == 0) unit_.barrier_arrive(shared_.step_full[step_.index]);
    step_.next();
  }

  EFFINFER_DEVICE void copy() {
    if (walk_.of_values()) {
      copy_values();
    } else {
      copy_keys();
    }
  }

  // Of units that are not visited the stage keeps what it has: their scores are hidden.
  EFFINFER_DEVICE void copy_keys() {
    constexpr int kHalf = Tiles::kKeyTile / 2;
    const bool both = walk_.unit_of(0) >= 0 && walk_.unit_of(1) >= 0;
    Mbarrier& full = shared_.full[stage_.index];
    unit_.barrier_arrive_expect(full, both ? 2 * Tiles::kPageBytes : Tiles::kPageBytes);
    EFFINFER_UNROLL
    for (int i = 0; i < kStepUnits; ++i) {
      if (walk_.unit_of(i) < 0) continue;
      const uint8_t* from = page_of(walk_.unit_of(i));
      uint8_t* to = shared_.ring[stage_.index] + i * kHalf;
      EFFINFER_UNROLL
      for (int tile = 0; tile < Tiles::kPageBytes / kHalf; ++tile) {
        unit_.copy_bulk(to + tile * Tiles::kKeyTile, from + tile * kHalf, kHalf, full);
      }
    }
  }

  // Values that are not visited are multiplied with weights of zero: those of the step's other unit
  // do, which are finite wherever the result is.
  EFFINFER_DEVICE void copy_values() {
    static_assert(Tiles::kValueTile == Tiles::kPageBytes);
    Mbarrier& full = shared_.full[stage_.index];
    unit_.barrier_arrive_expect(full, 2 * Tiles::kPageBytes);
    EFFINFER_UNROLL
    for (int i = 0; i < kStepUnits; ++i) {
      const int32_t own = walk_.unit_of(i);
      const uint8_t* from = page_of(own >= 0 ? own : walk_.unit_of(1 - i)) + Tiles::kPageBytes;
      unit_.copy_bulk(shared_.ring[stage_.index] + i * Tiles::kValueTile, from, Tiles::kPageBytes,
                      full);
    }
  }

  Unit& unit_;
  Shared& shared_;
  const uint8_t* const unit_zero_;  // where unit 0 of the sequence would lie
  StageWalk<Unit> walk_;
  RingPlace<Shared::kStages> stage_;
  RingPlace<Shared::kSteps> step_;
};

}  // namespace effinfer::cuda
