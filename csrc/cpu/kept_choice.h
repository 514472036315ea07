// What a row of a sequence has chosen, and the queries that chose it, in a plane of the sequence
// (effinfer/slot_plane.h), for rows behind it whose queries are alike (TokenSelect, Wu et al.,
// arXiv:2411.02886, the selection cache of section 3.4). A page has as many numbers as slots:
//
//   number   0, 1                2 ... 5 of page 0                             16 ... 63
//            the bits of its     the place behind the last row; the page of    the queries, 48 of
//            tokens that were    the one that chose; how many rows chose, and  them a page, from
//            chosen              how many visited what another one had chosen  page 0 on
//
// A choice holds while a sequence's rows follow each other and stay on the page of the one that
// chose, so that they choose from the same pages.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/kv_layout.h"

namespace effinfer::cpu {

class KeptChoice {
 public:
  // Of a KV head's plane; null: there is none. `size` numbers of queries of a row at a position.
  KeptChoice(float* plane, const float* queries, int64_t size, int64_t position)
      : plane_(plane), queries_(queries), size_(size), position_(position) {
    if (plane_ != nullptr && (size + kOfPage - 1) / kOfPage > own_page()) plane_ = nullptr;
  }

  // Whether it holds for the row, whose queries have a cosine of more than `least` with those.
  bool holds(float least) const {
    if (plane_ == nullptr || plane_[kNext] != static_cast<float>(position_)) return false;
    if (plane_[kPage] != static_cast<float>(own_page())) return false;
    double both = 0.0, own = 0.0, kept = 0.0;
    for (int64_t i = 0; i < size_; ++i) {
      const double x = queries_[i], y = plane_[place(i)];
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
    ++plane_[kReused];
    plane_[kNext] = static_cast<float>(position_ + 1);
  }

  void keep(const uint64_t* words, int64_t first, int64_t count) const {
    if (plane_ == nullptr) return;
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(plane_ + (first + i) * ops::kPageSize, words + i, sizeof(uint64_t));
    }
    for (int64_t i = 0; i < size_; ++i) plane_[place(i)] = queries_[i];
    plane_[kPage] = static_cast<float>(own_page());
    ++plane_[kChosen];
    plane_[kNext] = static_cast<float>(position_ + 1);
  }

 private:
  static constexpr int64_t kNext = 2, kPage = 3, kChosen = 4, kReused = 5;
  static constexpr int64_t kFirst = 16;
  static constexpr int64_t kOfPage = ops::kPageSize - kFirst;

  static int64_t place(int64_t i) { return i / kOfPage * ops::kPageSize + kFirst + i % kOfPage; }
  int64_t own_page() const { return position_ / ops::kPageSize; }

  float* plane_;
  const float* queries_;
  int64_t size_;
  int64_t position_;
};

}  // namespace effinfer::cpu
