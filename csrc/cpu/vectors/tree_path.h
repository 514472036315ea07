// The path of a row in a tree of drafts, where it does not lie in the slots of its depths.
//
//   slot     0  1  2  3  4  5        the row in slot 5 is at depth 3, its ancestors lie in 0, 1, 3:
//   depth    0  1  2  2  3  3        their places are 0, 1, 2
//
// Softmax sums weights by lanes of slots. A step of the path alone has each token in its place, so
// scores go there for the softmax, and weights back to the slots for the values, which are summed
// in the order of slots: on a path the order of depths. All other sums know no slots.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/vectors/key_unit.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Whether tokens of a row's word, in a tree, lie elsewhere than in their places.
inline bool is_displaced(uint64_t word) {
  return (word & (word + 1)) != 0;
}

// What a unit from token `start` of the sequence on holds of a row's path.
class TreePath {
 public:
  TreePath(const AttentionTask& task, int64_t row, int64_t start) {
    const uint64_t word = task.ancestors[row];
    const int64_t length = __builtin_popcountll(word);
    const int64_t shift = task.tree_start - start;
    position_ = task.tree_start + length - 1;
    slots_ = shifted(word, shift);
    seen_ = seen_on_chain(task, position_, start);
    // A tree lies on two pages at most, and `page` is what the first one has of it.
    const int64_t offset = task.tree_start % kUnit;
    const int64_t page = kUnit - offset;
    const int64_t before = __builtin_popcountll(word & token_bits(0, page));
    stays_ = before == (length < page ? length : page);
    first_ = shift >= 0 ? shift : before + shift;
  }

  // The row's own place in the sequence.
  int64_t position() const { return position_; }
  // Whether each token lies on the page of its place.
  bool stays() const { return stays_; }
  // Of the unit's places, those that the row sees.
  uint64_t seen() const { return seen_; }

  // From slots to places; what is in other places may be anything.
  void close_up(float* x) const {
    int64_t place = first_;
    for (uint64_t slots = slots_; slots != 0; slots &= slots - 1) {
      x[place++] = x[__builtin_ctzll(slots)];
    }
  }
  // Back, of what is 0 in other places, and in other slots then.
  void spread(float* x) const {
    int64_t place = first_ + __builtin_popcountll(slots_);
    for (uint64_t slots = slots_; slots != 0;) {
      const int64_t slot = kUnit - 1 - __builtin_clzll(slots);
      slots &= ~(uint64_t{1} << slot);
      const float value = x[--place];
      x[place] = 0.0f;
      x[slot] = value;
    }
  }
  // The places of the path's tokens in the sequence, by slots.
  void set_positions(int64_t start, float* positions) const {
    int64_t place = start + first_;
    for (uint64_t slots = slots_; slots != 0; slots &= slots - 1) {
      positions[__builtin_ctzll(slots)] = static_cast<float>(place++);
    }
  }

 private:
  uint64_t slots_;
  uint64_t seen_;
  int64_t first_;  // place in the unit of the first of the slots
  int64_t position_;
  bool stays_;
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
