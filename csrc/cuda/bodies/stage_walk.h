// Which units of a sequence an item's stages are of, in their order.
//
// A step is two units of 64 tokens: a stage of keys, then one of values. A segment, of which values
// go on in one sum, is 32 units:
//
//   without a list     those of 2048 tokens in a row; units 2 i and 2 i + 1 are a step
//   with one           the next 32 that the list has, wherever they are, and pairs of those: lists
//                      of few units have few segments and few steps
//   and with windows   those that it has of 2048 tokens in a row, as tiles see different ones
//
// Which ones are follows from the list alone, neither from the item nor from the rows beside; pairs
// of which the tile visits nothing are left out. An item has the segments that begin in its units,
// and its partial results are counted by these.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/wgmma_pages.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kStepUnits = kStepTokens / kUnitTokens;

struct KeyStep {
  int32_t starts[kStepUnits];  // tokens of the sequence; the first -1: no step
  int32_t segment;             // where its segment begins, in 2048 tokens
  uint64_t words[kStepUnits];  // visited tokens
};

// What else than its units an item's stages follow from.
struct SegmentRule {
  bool by_rank;      // segments are units of the list, and not of tokens in a row
  int32_t tile_end;  // unit
};
EFFINFER_DEVICE SegmentRule segment_rule_of(const ops::AttentionProblem& p,
                                            const ops::AttentionTile& tile,
                                            const ItemUnits& units) {
  return {units.words != nullptr && p.window_left < 0, tile.end_unit};
}

// The stages of an item in their order. A warp walks together, a lane a unit of a segment.
template <class Unit, bool kHasPages>
class StageWalk {
 public:
  EFFINFER_DEVICE StageWalk(Unit& unit, const ItemUnits& item, const SegmentRule& rule)
      : unit_(unit),
        item_(item),
        by_rank_(unit.shfl(rule.by_rank ? 1 : 0, 0) != 0),
        end_(by_rank_ ? rule.tile_end : item.end),
        next_(by_rank_ ? 0 : item.first / kWarp * kWarp) {}

  // The next step, whose keys are first; or all are over.
  EFFINFER_DEVICE void begin_step() {
    of_values_ = false;
    for (;;) {
      while (at_ < count_) {
        first_ = at_;
        second_ = at_ + 1 < count_ ? at_ + 1 : at_;
        at_ += 2;
        if (((visited_ >> first_ | visited_ >> second_) & 1) == 0) continue;
        units_[0] = unit_.shfl(place_, first_);
        units_[1] = unit_.shfl(place_, second_);
        return;
      }
      if (find_segment()) continue;
      segment_ = -1;
      return;
    }
  }
  EFFINFER_DEVICE void begin_values() { of_values_ = true; }

  EFFINFER_DEVICE bool is_over() const { return segment_ < 0; }
  EFFINFER_DEVICE bool of_values() const { return of_values_; }

  // Of a block of 32 tokens of the step: its page, -1 where nothing is visited.
  EFFINFER_DEVICE int32_t page_of(int block) const {
    const int32_t page = unit_.shfl(page_, block / 2 == 0 ? first_ : second_);
    return unit_of(block / 2) >= 0 ? page : -1;
  }
  // Unit `index` of the step, -1 where nothing of it is visited.
  EFFINFER_DEVICE int32_t unit_of(int index) const {
    if (index == 1 && second_ == first_) return -1;
    const int at = index == 0 ? first_ : second_;
    const int32_t unit = index == 0 ? units_[0] : units_[1];  // registers have no index
    return (visited_ >> at & 1) != 0 ? unit : -1;
  }

  EFFINFER_DEVICE void store(KeyStep& to) const {
    const uint64_t word = (visited_ >> unit_.lane & 1) != 0 ? word_ : 0;
    if (unit_.lane == second_) to.words[1] = second_ == first_ ? 0 : word;
    if (unit_.lane == first_) to.words[0] = word;
    if (unit_.lane != 0) return;
    to.starts[0] = is_over() ? -1 : units_[0] * kUnitTokens;
    to.starts[1] = units_[1] * kUnitTokens;
    to.segment = segment_;
  }

 private:
  static_assert(kStepUnits == 2 && ops::kSegmentUnits == kWarp);
  // Words that are asked for at once, of a lane. Who has pages, too, has few registers.
  static constexpr int kAhead = kHasPages ? 1 : 4;

  // The item's next segment of which something is visited.
  EFFINFER_DEVICE bool find_segment() {
    do {
      collect();
      if (count_ == 0) return false;
      segment_ = unit_.shfl(place_, 0) / kWarp;
      if (segment_ * kWarp >= item_.end) return false;
      bool visits = unit_.lane < count_;
      if (by_rank_) {
        visits = visits && segment_ * kWarp >= item_.first;  // else another item has it
      } else {
        visits = visits && is_visited(item_, place_);
      }
      visited_ = unit_.ballot(visits);
      if constexpr (kHasPages) {
        if (visits) page_ = unit_.load(item_.pages + place_);
      }
    } while (visited_ == 0);
    return true;
  }

  // The next segment's units, one a lane.
  EFFINFER_DEVICE void collect() {
    count_ = at_ = 0;
    for (;;) {
      EFFINFER_UNROLL
      for (int i = 0; i < kAhead; ++i) take(i);
      if (count_ == kWarp || (count_ > 0 && !by_rank_) || next_ >= end_) return;
      load();
    }
  }

  EFFINFER_DEVICE void load() {
    EFFINFER_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int32_t at = next_ + i * kWarp + unit_.lane;
      words_[i] = at < end_ ? ~uint64_t{0} : 0;
      if (at < end_ && item_.words != nullptr) words_[i] = unit_.load(item_.words + at);
    }
    EFFINFER_UNROLL
    for (int i = 0; i < kAhead; ++i) left_[i] = unit_.ballot(words_[i] != 0);
    next_ += kAhead * kWarp;
  }

  // Listed units of 32 that were loaded, as many as the segment has room for.
  EFFINFER_DEVICE void take(int i) {
    const uint32_t listed = left_[i];
    if (listed == 0 || count_ == kWarp || (count_ > 0 && !by_rank_)) return;
    const int number = unit_.popcount(listed);
    const int own = unit_.lane - count_;
    const int at = bit_at(listed, own < 0 ? 0 : own);
    const uint64_t word = unit_.shfl(words_[i], at % kWarp);
    if (own >= 0 && own < number) {
      place_ = next_ + (i - kAhead) * kWarp + at;
      word_ = word;
    }
    const int room = kWarp - count_;
    count_ += number < room ? number : room;
    left_[i] = number <= room ? 0 : listed & ~uint32_t{0} << bit_at(listed, room);
  }

  // Of the bits that are set, number `index`.
  EFFINFER_DEVICE int bit_at(uint32_t bits, int index) const {
    int at = 0;
    EFFINFER_UNROLL
    for (int half = kWarp / 2; half > 0; half /= 2) {
      const int below = unit_.popcount(bits >> at & ((1u << half) - 1));
      if (index < below) continue;
      index -= below;
      at += half;
    }
    return at;
  }

  Unit& unit_;
  const ItemUnits& item_;
  const bool by_rank_;
  const int32_t end_;  // of what is looked at
  int32_t next_;       // not loaded yet
  uint64_t words_[kAhead] = {};
  uint32_t left_[kAhead] = {};  // of them, listed and in no segment yet
  int32_t segment_ = 0;         // where it begins, in 32 units; -1: there is none
  int count_ = 0;               // of its units
  int at_ = 0;                  // those in no step yet
  uint32_t visited_ = 0;
  int32_t place_ = 0;  // of the lane's unit
  uint64_t word_ = 0;
  int32_t page_ = 0;
  int first_ = 0;   // units of the step, of the segment
  int second_ = 0;  // the same as the first one: there is none
  int32_t units_[kStepUnits] = {};
  bool of_values_ = false;
};

}  // namespace effinfer::cuda
