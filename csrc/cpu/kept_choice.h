// The choices that rows of a sequence keep for those behind them (ops/kept_choice.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/kept_choice.h"

namespace effinfer::cpu {

class KeptChoice {
 public:
  // Of a KV head's plane; null: there is none. `size` numbers of queries of a row at a position.
  KeptChoice(float* plane, const float* queries, int64_t size, int64_t position)
      : plane_(plane), queries_(queries), size_(size), position_(position) {
    if (plane_ != nullptr && !Place::fits(size, position)) plane_ = nullptr;
  }

  // Whether it holds for the row, whose queries have a cosine of more than `least` with those.
  bool holds(float least) const {
    if (plane_ == nullptr || plane_[Place::kNext] != static_cast<float>(position_)) return false;
    if (plane_[Place::kPage] != static_cast<float>(own_page())) return false;
    double both = 0.0, own = 0.0, kept = 0.0;
    for (int64_t i = 0; i < size_; ++i) {
      const double x = queries_[i], y = plane_[Place::of_query(i)];
      both += x * y;
      own += x * x;
      kept += y * y;
    }
    return both > 0.0 && both * both > double{least} * double{least} * own * kept;
  }

  // What was chosen of the pages [first, first + count), a word each.
  void copy_to(uint64_t* words, int64_t first, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(words + i, plane_ + (first + i) * ops::kPageSize, sizeof(uint64_t));
    }
    ++plane_[Place::kReused];
    plane_[Place::kNext] = static_cast<float>(position_ + 1);
  }

  void keep(const uint64_t* words, int64_t first, int64_t count) const {
    if (plane_ == nullptr) return;
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(plane_ + (first + i) * ops::kPageSize, words + i, sizeof(uint64_t));
    }
    for (int64_t i = 0; i < size_; ++i) plane_[Place::of_query(i)] = queries_[i];
    plane_[Place::kPage] = static_cast<float>(own_page());
    ++plane_[Place::kChosen];
    plane_[Place::kNext] = static_cast<float>(position_ + 1);
  }

 private:
  using Place = ops::KeptPlace;

  int64_t own_page() const { return position_ / ops::kPageSize; }

  float* plane_;
  const float* queries_;
  int64_t size_;
  int64_t position_;
};

}  // namespace effinfer::cpu
