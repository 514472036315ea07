// The highest outputs of a row of a matmul, kept where they are computed: what greedy and top-k
// sampling need of a vocabulary.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace effinfer::ops {

inline constexpr int kMaxTop = 64;

// Floats in the order of these integers: -infinity .. +infinity, both zeros alike, NaNs at both
// ends.
[[gnu::always_inline]] inline int32_t order_key(float value) {
  const int32_t bits = std::bit_cast<int32_t>(value + 0.0f);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// What one member of a team keeps of one row, highest first, the lower index among equals.
struct TopList {
  struct Entry {
    float value;
    int32_t index;
  };
  int32_t count = 0;
  int32_t nans = 0;                                     // not zero: the row holds a NaN
  int32_t least = std::numeric_limits<int32_t>::min();  // key of the last entry, once full
  Entry entries[kMaxTop];

  void clear() {
    count = 0;
    nans = 0;
    least = std::numeric_limits<int32_t>::min();
  }

  // Keeps the entry if it is among the `k` highest so far; any order of calls gives one result.
  void add(Entry entry, int32_t k) {
    if (count == k && !before(entry, entries[k - 1])) return;
    int32_t place = count == k ? k - 1 : count++;
    for (; place > 0 && before(entry, entries[place - 1]); --place) {
      entries[place] = entries[place - 1];
    }
    entries[place] = entry;
    if (count == k) least = order_key(entries[k - 1].value);
  }

 private:
  static bool before(const Entry& a, const Entry& b) {
    return a.value != b.value ? a.value > b.value : a.index < b.index;
  }
};

}  // namespace effinfer::ops
