// A sequence as the KV cache keeps it: its tokens, and for each group of layers a page table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "effinfer/kv_cache.h"
#include "kv/planes.h"

namespace effinfer::kv {

// Softmax is folded in chunks of so many pages (ops/attention.h): a table that loses its first
// tokens by whole chunks gives the same bits.
inline constexpr int64_t kChunkPages = 4;
inline constexpr int32_t kFreed = -1;

// A table's slots are the sequence's last `slots` tokens, until keys are dropped one by one.
struct PageTable {
  std::vector<int32_t> pages;  // ceil(slots / 64); of a window up to 3 of the first are kFreed
  int64_t slots = 0;

  size_t num_freed() const {
    size_t count = 0;
    while (count < pages.size() && pages[count] == kFreed) ++count;
    return count;
  }
};

struct Sequence {
  std::vector<int32_t> tokens;
  std::vector<PageTable> tables;  // by group
  std::vector<Plane> planes;      // of the slots of groups without a window
  int64_t committed = 0;
  PrefixKey key;
  int64_t shift = 0;      // next position less tokens
  int64_t fixed = 0;      // tokens that cannot be rolled back, since keys were dropped behind them
  bool is_prefix = true;  // every slot holds what feeding its token gave
  // Pages of a prefix that is known, but not the window behind it, which is cached when the
  // sequence is there. 0: none.
  size_t wanted_prefix = 0;

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  int64_t uncommitted() const { return length() - committed; }
  // Of the first slot of a window's table.
  int64_t first_token(const PageTable& table) const { return length() - table.slots; }
  void leave_prefix() {
    fixed = length();
    is_prefix = false;
    wanted_prefix = 0;
  }
};

// The first page that a window needs when `tokens` are there.
inline int64_t first_needed_page(int64_t window_left, int64_t tokens) {
  const int64_t first = tokens - window_left;
  return first > 0 ? first / KvCache::kPageSize : 0;
}

}  // namespace effinfer::kv
