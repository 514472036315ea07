// What a row of a sequence has chosen, for rows behind it whose queries are alike
// (ops/kept_choice.h): the threads of a block for each KV head's plane, which the host sees, too.
#pragma once

#include <cstdint>

#include "cuda/bodies/row_block.h"
#include "cuda/bodies/row_chunks.h"
#include "cuda/unit.h"
#include "ops/kept_choice.h"

namespace effinfer::cuda {

template <class Unit>
class KeptChoice {
 public:
  using Place = ops::KeptPlace;

  // Of a KV head's plane; null: there is none.
  EFFINFER_DEVICE KeptChoice(RowBlock<Unit>& block, float* plane, const float* queries, int size,
                             int position)
      : block_(block), plane_(plane), queries_(queries), size_(size), position_(position) {
    if (plane_ != nullptr && !Place::fits(size, position)) plane_ = nullptr;
  }

  // A barrier where there is a plane.
  EFFINFER_DEVICE bool holds(float least) {
    if (plane_ == nullptr) return false;
    const bool follows = plane_[Place::kNext] == static_cast<float>(position_) &&
                         plane_[Place::kPage] == static_cast<float>(own_page());
    double sums[3] = {};
    EFFINFER_NO_UNROLL
    for (int i = block_.unit().thread; follows && i < size_; i += kRowThreads) {
      const double x = queries_[i];
      const double y = plane_[Place::of_query(i)];
      sums[0] += x * y;
      sums[1] += x * x;
      sums[2] += y * y;
    }
    block_.sum(sums);
    return sums[0] > 0.0 && sums[0] * sums[0] > double{least} * double{least} * sums[1] * sums[2];
  }

  // What was chosen of a page, and what is.
  EFFINFER_DEVICE uint64_t word(int64_t page) const {
    const Pair pair = *word_of(page);
    return uint64_t{pair.words[1]} << 32 | pair.words[0];
  }
  EFFINFER_DEVICE void keep_word(int64_t page, uint64_t word) const {
    if (plane_ == nullptr) return;
    *word_of(page) = {{static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)}};
  }

  // After holds(), behind whose barrier nobody reads the numbers that these replace.
  EFFINFER_DEVICE void end(bool held) const {
    if (plane_ == nullptr) return;
    if (!held) {
      EFFINFER_NO_UNROLL
      for (int i = block_.unit().thread; i < size_; i += kRowThreads) {
        plane_[Place::of_query(i)] = queries_[i];
      }
    }
    if (block_.unit().thread != 0) return;
    plane_[Place::kPage] = static_cast<float>(own_page());
    ++plane_[held ? Place::kReused : Place::kChosen];
    plane_[Place::kNext] = static_cast<float>(position_ + 1);
  }

 private:
  EFFINFER_DEVICE Pair* word_of(int64_t page) const {
    return reinterpret_cast<Pair*>(plane_ + page * ops::kPageSize);
  }
  EFFINFER_DEVICE int own_page() const { return position_ / int{ops::kPageSize}; }

  RowBlock<Unit>& block_;
  float* plane_;
  const float* queries_;
  const int size_;
  const int position_;
};

}  // namespace effinfer::cuda
