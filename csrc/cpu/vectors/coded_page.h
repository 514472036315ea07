// A coded page of one head into lines of bfloat16, in the tile order of the attention kernels.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu/level.h"
#include "ops/coded_pages.h"
#if EFFINFER_LEVEL_PORTABLE
#include "cpu/vectors/code_table_portable.h"
#elif EFFINFER_LEVEL_AVX2
#include "cpu/vectors/code_table_avx2.h"
#else
#include "cpu/vectors/code_table_avx512.h"
#endif

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

constexpr int64_t kCodeRow = 64;  // bytes, and those of a line

// Rows of codes, each range of kRangeLines lines; line i of row r goes to place(r, i). What lies
// `ahead` bytes behind is fetched meanwhile.
template <int kBits, int kRangeLines, class Place>
void decode_rows(const uint8_t* codes, const ops::CodeRange* ranges, int64_t num_rows,
                 int64_t ahead, Place&& place) {
  constexpr int kRowLines = 16 / kBits;
  for (int64_t row = 0; row < num_rows; ++row, codes += kCodeRow) {
    __builtin_prefetch(codes + ahead, 0, 2);
    const auto decode_range =
        [&]<int kFirst, int... kLine>(
            std::integer_sequence<int, kLine...>) __attribute__((always_inline)) {
          const CodeTable table(*ranges++);
          (table.template decode<kBits, kFirst + kLine>(codes, place(row, kFirst + kLine)), ...);
        };
    [&]<int... kRange>(std::integer_sequence<int, kRange...>) __attribute__((always_inline)) {
      const std::make_integer_sequence<int, kRangeLines> lines;
      (decode_range.template operator()<kRange * kRangeLines>(lines), ...);
    }(std::make_integer_sequence<int, kRowLines / kRangeLines>());
  }
}

template <int kBits>
void decode_head(const ops::CodedPages& coded, const uint8_t* from, int64_t ahead, uint8_t* keys,
                 uint8_t* values) {
  using Range = const ops::CodeRange*;
  constexpr int kRowLines = 16 / kBits;
  const int64_t dim = coded.head_dim;
  const int64_t num_rows = 2 * dim / kRowLines;
  const size_t code_bytes = coded.code_bytes();
  decode_rows<kBits, ops::CodedPages::kKeyLines>(
      from, reinterpret_cast<Range>(from + code_bytes), num_rows, ahead,
      [&](int64_t row, int line) __attribute__((always_inline)) {
        // Four groups of tokens of each pair of dimensions.
        const int64_t pair = row * (kRowLines / 4) + line / 4;
        return keys + (line % 4 * (dim / 2) + pair) * kCodeRow;
      });
  from += coded.key_bytes();
  decode_rows<kBits, kBits>(from, reinterpret_cast<Range>(from + code_bytes), num_rows, ahead,
                            [&](int64_t row, int line) __attribute__((always_inline)) {
                              return values + (row * kRowLines + line) * kCodeRow;
                            });
}

// Keys and values of a page, whose data are of one head; those of `next`, where it is a coded page,
// are fetched meanwhile.
inline void decode_page(const ops::CodedPages& coded, int32_t page, int32_t next, uint8_t* keys,
                        uint8_t* values) {
  const uint8_t* from = coded.head(page, 0);
  const int64_t ahead = coded.holds(next) ? coded.head(next, 0) - from : 0;
  (coded.bits == 4 ? decode_head<4> : decode_head<2>)(coded, from, ahead, keys, values);
}

// A line of bfloat16 pairs as a line of float32 of the first ones, and one of the second ones,
// which may lie where it did.
inline void widen_line(const uint8_t* line, uint8_t* first, uint8_t* second) {
  uint32_t dwords[16];
  uint32_t firsts[16];
  __builtin_memcpy(dwords, line, sizeof(dwords));
  for (int i = 0; i < 16; ++i) {
    firsts[i] = dwords[i] << 16;
    dwords[i] &= 0xffff0000u;
  }
  __builtin_memcpy(first, firsts, sizeof(firsts));
  __builtin_memcpy(second, dwords, sizeof(dwords));
}

// A decoded page of one head to float32, in its place, which is twice as long: from the last line
// on. A pair of dimensions of keys becomes two lines that follow each other,
inline void widen_keys(uint8_t* keys, int64_t dim) {
  for (int64_t line = 2 * dim - 1; line >= 0; --line) {
    uint8_t* to = keys + 2 * line * kCodeRow;
    widen_line(keys + line * kCodeRow, to, to + kCodeRow);
  }
}

// and a pair of tokens two rows of all dimensions.
inline void widen_values(uint8_t* values, int64_t dim) {
  const int64_t row = dim / 16 * kCodeRow;
  for (int64_t pair = 31; pair >= 0; --pair) {
    for (int64_t at = 0; at < row; at += kCodeRow) {
      uint8_t* to = values + 2 * pair * row + at;
      widen_line(values + pair * row + at, to, to + row);
    }
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
