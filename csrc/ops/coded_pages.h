// Pages whose keys and values take 4 or 2 bits each: whole pages that a sequence has behind it.
//
// A channel of keys has one range over the page's 64 tokens, a token's values one over a block of
// dimensions, as KIVI has it (Liu et al., arXiv:2402.02750, section 3.2): keys have channels that
// stand out, values do not. A code c stands for start + c * step. Blocks of values have 64 (4 bits)
// or 32 dimensions (2 bits); where head_dim is no multiple of that, the last ones have half of it,
// or a fourth.
//
// Attention multiplies codes as they are: of keys, q . (start + step c) = q . start + (q step) . c,
// and of values in the same way. So starts and steps are apart, and codes lie as the products want
// them. A line is 16 columns of two neighbours of the inner dimension, each a word of 16 bits: of
// keys 16 tokens x 2 dimensions, of values 16 dimensions x 2 tokens. A row of 64 bytes has 16 / b
// lines; word w of it has the codes of their words w:
//
//   4 bits   | line 3 | line 2 | line 1 | line 0 |              low bits on the right
//   2 bits   | line 7 | line 6 | ...    | line 0 |
//
// so that a shift and a mask give a line of small integers. The lines of a pair follow each other:
// of keys 4 (64 tokens), of a block of values 4, 2 or 1. A head of a page is
//
//   keys                 codes  [D / 2 pairs of dimensions][4 lines]    8 b D bytes
//                        starts [D], steps [D]                          binary16
//   each block of W      codes  [32 pairs of tokens][W / 16 lines]      8 b W bytes
//   dimensions of values starts [64], steps [64]                        binary16
//
// which is 28.1 % (4 bits) or 17.2 % (2 bits) of the page's bytes, where all blocks are whole.
//
// Behind the keys, and behind the values, may lie what their codes lack: factors of low rank and
// outliers (GEAR, Kang et al., arXiv:2403.05527). With I x C numbers, of keys D x 64, of values 64
// x D, number (i, c) lacks the sum of u_k[i] w_k[c], and what an outlier at its place says:
//
//   factors   [rank] { u [I], w [C] }                   bfloat16
//   outliers  places [n]: 256 i + c, numbers [n]        uint16, bfloat16
//   nothing   to the next multiple of 64 bytes
//
// Pages may hold features in place of keys and values (ops/page_features.h). These are then the
// numbers of which all of the above is made, in parts of at most 256 in place of heads, and behind
// each part is a row of 64 bytes with the page's place in its sequence (int32), by which its keys
// are turned.
//
// Or they hold numbers of vectors (ops/page_codebooks.h), a byte for 4 dimensions of a token: of a
// head [D / 4][64 tokens] of keys, the same of values, and such a row of 64 bytes.
//
// A GPU has them in memory of whole pages that nobody has as such (CodedMemory). Attention reads
// them decoded there, as pages of scratch memory (DecodedPages).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "ops/page_codebooks.h"
#include "ops/page_features.h"

namespace effinfer::ops {

// Coded page n of a layer on a GPU is part n % parts of page n / parts of the pool, which then is
// in no sequence. A layer's slot of a page has `layer_parts` of them, all their keys where its keys
// were, head after head, and their values, each with the row behind it, where its values were.
// Layers that share features take the slots of all of them, one behind the other.
struct CodedMemory {
  uint8_t* k = nullptr;  // of the first layer that shares them; null: CodedPages::data has them
  uint8_t* v = nullptr;
  int64_t page_stride = 0;   // bytes
  int64_t layer_stride = 0;  // bytes
  int32_t layer_parts = 0;
  int32_t parts = 0;

  // `bytes`: of keys, or of values, of all heads.
  constexpr int64_t offset(int32_t number, int64_t bytes) const {
    const int32_t part = number % parts;
    return number / parts * page_stride + part / layer_parts * layer_stride +
           part % layer_parts * bytes;
  }
};

// Of a step on a GPU: the coded pages that its sequences hold, in memory that layers share. Tables
// of pages have them as `first_page` and their place among these.
struct DecodedPages {
  const int32_t* numbers = nullptr;  // [count] of coded pages, on the device; -1: none
  int32_t count = 0;
  uint8_t* k = nullptr;  // [count] pages of a layer
  uint8_t* v = nullptr;
};

// A layer's.
struct CodedPages {
  int32_t bits = 0;  // 4 or 2; 0: there are none
  // The least id of a coded page: ids below are of pages as they were written.
  int32_t first_page = std::numeric_limits<int32_t>::max();
  int32_t num_kv_heads = 0;  // or parts of features
  int32_t head_dim = 0;      // or features of a part
  uint8_t* data = nullptr;
  int32_t rank = 0;
  int32_t outliers = 0;                      // of keys, and as many of values
  const PageFeatures* features = nullptr;    // null: numbers are keys and values
  const PageCodebooks* codebooks = nullptr;  // null: codes are of ranges
  CodedMemory memory = {};                   // of a GPU, in place of `data`

  static constexpr int32_t kMostRank = 16;
  static constexpr int32_t kMostOutliers = 256;
  static constexpr int32_t kTokens = 64;
  static constexpr int32_t kKeyLines = kTokens / 16;  // of a pair
  static constexpr size_t kRow = 64;                  // bytes

  bool holds(int32_t page) const { return page >= first_page; }
  // Of so many dimensions of keys, or of values.
  constexpr size_t code_bytes(int32_t dims) const {
    return size_t{8} * static_cast<size_t>(bits * dims);
  }
  // Of starts, or of steps.
  static constexpr size_t range_bytes(int32_t ranges) {
    return sizeof(uint16_t) * static_cast<size_t>(ranges);
  }
  // Of keys, and of values.
  size_t rest_bytes() const {
    const auto numbers = static_cast<size_t>(rank * (kTokens + head_dim) + 2 * outliers);
    return (sizeof(uint16_t) * numbers + kRow - 1) / kRow * kRow;
  }
  size_t vector_bytes() const {
    return static_cast<size_t>(kTokens * (head_dim / PageCodebooks::kDims));
  }
  [[gnu::always_inline]] size_t key_bytes() const {
    if (codebooks != nullptr) return vector_bytes();
    return code_bytes(head_dim) + 2 * range_bytes(head_dim) + rest_bytes();
  }
  // Of the block of values that begins at a dimension.
  constexpr int32_t block_dims(int32_t first) const {
    int32_t dims = bits == 4 ? 64 : 32;
    while (dims > head_dim - first) dims /= 2;
    return dims;
  }
  constexpr size_t block_bytes(int32_t dims) const {
    return code_bytes(dims) + 2 * range_bytes(kTokens);
  }
  [[gnu::always_inline]] size_t value_bytes() const {
    if (codebooks != nullptr) return vector_bytes();
    size_t bytes = rest_bytes();
    for (int32_t first = 0; first < head_dim; first += block_dims(first)) {
      bytes += block_bytes(block_dims(first));
    }
    return bytes;
  }
  [[gnu::always_inline]] size_t head_bytes() const {
    return key_bytes() + value_bytes() + (has_places() ? kRow : 0);
  }
  // Of values, and of the row behind them.
  size_t behind_keys() const { return head_bytes() - key_bytes(); }
  // Keys; the values are key_bytes() behind.
  [[gnu::always_inline]] uint8_t* head(int32_t page, int64_t head) const {
    const auto place = static_cast<size_t>(int64_t{page - first_page} * num_kv_heads + head);
    return data + place * head_bytes();
  }
  // On a GPU, of a head: of a page's keys, and of its values.
  uint8_t* keys_of(int32_t page, int32_t head) const {
    const auto bytes = static_cast<int64_t>(key_bytes());
    return memory.k + memory.offset(page - first_page, num_kv_heads * bytes) + head * bytes;
  }
  uint8_t* values_of(int32_t page, int32_t head) const {
    const auto bytes = static_cast<int64_t>(behind_keys());
    return memory.v + memory.offset(page - first_page, num_kv_heads * bytes) + head * bytes;
  }
  // Whether keys are turned back by the place of their page.
  bool has_places() const { return features != nullptr || codebooks != nullptr; }
  [[gnu::always_inline]] int32_t* place(int32_t page, int64_t part) const {
    return reinterpret_cast<int32_t*>(head(page, part) + key_bytes() + value_bytes());
  }
};

}  // namespace effinfer::ops
