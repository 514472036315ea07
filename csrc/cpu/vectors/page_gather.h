// Tokens of several pages of the engine's cache taken together as one page, in the same order of
// tiles (ops/kv_layout.h): what sparse attention multiplies where a page has few visited
// tokens.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "ops/kv_layout.h"

namespace effinfer::cpu::simd {
namespace {

// P: elements in a dword.
template <int P>
class PageGather {
 public:
  // `memory` is for kPageSize * (2 * head_dim + 2) floats.
  PageGather(const AttentionTile& tile, float* memory) : tile_(tile) {
    k_scale_ = memory;
    v_scale_ = k_scale_ + kPage;
    k_ = reinterpret_cast<uint32_t*>(v_scale_ + kPage);
    v_ = k_ + kPage * tile.head_dim / P;
  }

  int64_t count() const { return count_; }
  void clear() { count_ = 0; }

  // Takes tokens of a page as long as there is room; returns those that are left.
  uint64_t add(int64_t page, uint64_t bits) {
    for (; bits != 0 && count_ < kPage; bits &= bits - 1) {
      tokens_[count_++] = {tile_.pages[page], static_cast<int32_t>(__builtin_ctzll(bits))};
    }
    return bits;
  }

  void pack() {
    for (int64_t i = 0; i < count_; ++i) copy_key(i);
    for (int64_t i = 0; i < count_; i += P) copy_values(i);
  }

  const uint8_t* k() const { return reinterpret_cast<const uint8_t*>(k_); }
  const uint8_t* v() const { return reinterpret_cast<const uint8_t*>(v_); }
  const float* k_scale() const { return k_scale_; }
  const float* v_scale() const { return v_scale_; }

 private:
  static constexpr int64_t kPage = ops::kPageSize;
  static constexpr int kBits = 32 / P;  // of an element

  struct Token {
    int32_t page_id;
    int32_t token;
  };

  // A dword of each line of 16 tokens.
  void copy_key(int64_t slot) {
    const Token from = tokens_[slot];
    const int64_t lines = tile_.head_dim / P;
    const uint32_t* source =
        reinterpret_cast<const uint32_t*>(tile_.k + from.page_id * tile_.page_bytes) +
        from.token / 16 * lines * 16 + from.token % 16;
    uint32_t* to = k_ + slot / 16 * lines * 16 + slot % 16;
    for (int64_t i = 0; i < lines; ++i) to[i * 16] = source[i * 16];
    if (tile_.k_scale == nullptr) return;
    k_scale_[slot] = tile_.k_scale[from.page_id * tile_.page_scales + from.token];
    v_scale_[slot] = tile_.v_scale[from.page_id * tile_.page_scales + from.token];
  }

  // The lines of P tokens from `slot` on: one element of each of their own lines.
  void copy_values(int64_t slot) {
    uint32_t* to = v_ + slot / P * tile_.head_dim;
    for (int j = 0; j < P; ++j) {
      // Behind the last token: that one again, which nothing multiplies.
      const Token from = tokens_[slot + j < count_ ? slot + j : count_ - 1];
      const uint32_t* source =
          reinterpret_cast<const uint32_t*>(tile_.v + from.page_id * tile_.page_bytes) +
          from.token / P * tile_.head_dim;
      const int down = from.token % P * kBits;
      if (j == 0) {
        for (int64_t d = 0; d < tile_.head_dim; ++d) to[d] = source[d] >> down & kElement;
      } else {
        for (int64_t d = 0; d < tile_.head_dim; ++d) {
          to[d] |= (source[d] >> down & kElement) << j * kBits;
        }
      }
    }
  }
  static constexpr uint32_t kElement = P == 1 ? ~uint32_t{0} : (uint32_t{1} << kBits % 32) - 1;

  const AttentionTile& tile_;
  float* k_scale_;
  float* v_scale_;
  uint32_t* k_;
  uint32_t* v_;
  int64_t count_ = 0;
  Token tokens_[kPage];
};

}  // namespace
}  // namespace effinfer::cpu::simd
