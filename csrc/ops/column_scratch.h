// What the kernels of a GPU that choose columns (ops/prefill_index.h) hand to each other, of some
// sequences at a time and each of their query heads:
//
//   keys, distances   sets, list_words each
//   columns           what each key gets of the asked rows' probabilities, 64 list_words floats
//   diagonals         what each distance does: distance d of a sequence of n keys at n - 1 - d
//   sums              of each part of the keys and row of a tile: its maximum, and its sum of
//                     exponentials
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/kv_layout.h"

namespace effinfer::ops {

inline constexpr int32_t kColumnRows = 64;      // asked rows of a tile
inline constexpr int32_t kColumnKeys = 128;     // that a block of threads multiplies at a time
inline constexpr int32_t kMostPartKeys = 2048;  // of a part, which is a block's

// How the keys of sequences up to 64 list_words are shared among blocks: it follows from that limit
// alone, so that sums have the same order in every step.
struct ColumnScratch {
  int64_t list_words = 0;
  int32_t part_keys = kColumnKeys;
  int32_t parts = 0;

  static constexpr ColumnScratch of(int64_t list_words) {
    ColumnScratch s;
    const int64_t keys = list_words * kPageSize;
    const int64_t wanted = (keys / 32 + kColumnKeys - 1) / kColumnKeys * kColumnKeys;
    s.list_words = list_words;
    s.part_keys = static_cast<int32_t>(std::clamp<int64_t>(wanted, 1024, kMostPartKeys));
    s.parts = static_cast<int32_t>((keys + s.part_keys - 1) / s.part_keys);
    return s;
  }
  // Of a sequence and head.
  constexpr int64_t bytes() const {
    return 2 * list_words * 8 + 2 * list_words * kPageSize * 4 + int64_t{parts} * kColumnRows * 8;
  }
};

// Sequences for which there is memory at once: all of them, or as many as 64 MB are enough for.
constexpr int64_t column_sequences(int64_t list_words, int64_t heads, int64_t most) {
  const int64_t each = ColumnScratch::of(list_words).bytes() * heads;
  const int64_t fitting = each > 0 ? (int64_t{64} << 20) / each : most;
  return std::clamp<int64_t>(fitting, 1, std::max<int64_t>(most, 1));
}

}  // namespace effinfer::ops
