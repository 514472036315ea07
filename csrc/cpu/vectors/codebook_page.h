// A page of numbers of vectors (ops/page_codebooks.h) made into one of keys and values.
#pragma once

#include <cstdint>

#include "cpu/vectors/expanded_page.h"
#include "cpu/vectors/page_turn.h"
#include "ops/coded_pages.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
class CodebookPage {
 public:
  // The data of `coded` are of the head.
  CodebookPage(const ops::CodedPages& coded, int32_t page, int64_t head)
      : books_(*coded.codebooks),
        codes_(coded.head(page, 0)),
        value_codes_(codes_ + coded.key_bytes()),
        place_(*coded.place(page, 0)),
        head_(head) {}

  [[gnu::noinline]] void expand_keys(uint32_t* to) const {
    alignas(64) float keys[kMostDims * kUnit];
    constexpr int64_t kDims = ops::PageCodebooks::kDims;
    for (int64_t group = 0; group < books_.head_dim / kDims; ++group) {
      const uint8_t* codes = codes_ + group * kUnit;
      for (int64_t d = 0; d < kDims; ++d) {
        const float* numbers = books_.keys + (books_.book(head_, group) * kDims + d) * kVectors;
        float* row = keys + books_.order[group * kDims + d] * kUnit;
        for (int64_t t = 0; t < kUnit; ++t) row[t] = numbers[codes[t]];
      }
    }
    turn_keys<typename Kv::V, false>(books_.turns, place_, keys);
    store_keys<Kv>(keys, books_.head_dim, to);
  }

  [[gnu::noinline]] void expand_values(uint32_t* to) const {
    alignas(64) float values[kMostDims * kUnit];
    constexpr int64_t kDims = ops::PageCodebooks::kDims;
    const int64_t dim = books_.head_dim;
    for (int64_t group = 0; group < dim / kDims; ++group) {
      const uint8_t* codes = value_codes_ + group * kUnit;
      const float* vectors = books_.values + books_.book(head_, group) * kVectors * kDims;
      for (int64_t t = 0; t < kUnit; ++t) {
        __builtin_memcpy(values + t * dim + group * kDims, vectors + codes[t] * kDims,
                         kDims * sizeof(float));
      }
    }
    store_values<Kv>(values, dim, to);
  }

 private:
  static constexpr int64_t kMostDims = 256;
  static constexpr int64_t kVectors = ops::PageCodebooks::kVectors;

  const ops::PageCodebooks& books_;
  const uint8_t* codes_;  // of keys
  const uint8_t* value_codes_;
  int32_t place_;
  int64_t head_;
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
