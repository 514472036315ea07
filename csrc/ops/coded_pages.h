// Pages whose keys and values take 4 or 2 bits each: whole pages that a sequence has behind it.
//
// A channel of keys has one range over the page's 64 tokens, a token's values one over 64 (4 bits)
// or 32 (2 bits) dimensions, as KIVI has it (Liu et al., arXiv:2402.02750, section 3.2): keys have
// channels that stand out, values do not. Where head_dim is no multiple of that, a range goes on
// with the next tokens. A code c stands for the bfloat16 next to least + c * step.
//
// Keys, and values, of one head are 2 D lines of bfloat16 pairs (ops/kv_layout.h), whose 32 words
// are even ones (a pair's first element) and odd ones. Codes are rows of 64 bytes; a row has 16 / b
// lines, and word w of it the codes of their words w:
//
//   4 bits   | line 3 | line 2 | line 1 | line 0 |              low bits on the right
//   2 bits   | line 7 | line 6 | ...    | line 0 |
//
// so that a shift gives a line's 32 codes where their words belong, and a table of 16 even and 16
// odd values turns them into the line. Lines of values follow each other as on a page; of keys, the
// 4 groups of tokens of each pair of dimensions do. A head of a page is
//
//   rows of keys   [8 b D bytes]      ranges of keys   [D / 2] CodeRange, each of 4 lines
//   rows of values [8 b D bytes]      ranges of values [2 D / b] CodeRange, each of b lines
//
// which is 28.1 % (4 bits) or 17.2 % (2 bits) of the page's bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace effinfer::ops {

// binary16 numbers, of the even and the odd words of some lines.
struct CodeRange {
  uint16_t least_even;
  uint16_t step_even;
  uint16_t least_odd;
  uint16_t step_odd;
};

// A layer's.
struct CodedPages {
  int32_t bits = 0;  // 4 or 2; 0: there are none
  // The least id of a coded page: ids below are of pages as they were written.
  int32_t first_page = std::numeric_limits<int32_t>::max();
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  uint8_t* data = nullptr;

  static constexpr int32_t kKeyLines = 4;  // of a range

  bool holds(int32_t page) const { return page >= first_page; }
  size_t code_bytes() const { return size_t{8} * static_cast<size_t>(bits * head_dim); }
  size_t key_bytes() const { return code_bytes() + size_t{4} * static_cast<size_t>(head_dim); }
  size_t head_bytes() const {
    return key_bytes() + code_bytes() + size_t{16} * static_cast<size_t>(head_dim / bits);
  }
  // Keys; the values are key_bytes() behind.
  uint8_t* head(int32_t page, int64_t head) const {
    const auto place = static_cast<size_t>(int64_t{page - first_page} * num_kv_heads + head);
    return data + place * head_bytes();
  }
};

}  // namespace effinfer::ops
