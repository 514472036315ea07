// What an index keeps of the keys of full pages beside the cache (ops::PageBounds): whoever asks
// first makes it, and writes it where nobody else writes at the same time; who comes second
// meanwhile makes it for itself, as it would take longer to wait.
#pragma once

#include <atomic>
#include <cstdint>

#include "ops/kv_layout.h"

namespace effinfer::cpu {

// Of ops::PageBounds::known.
enum Known : int32_t { kUnknown, kKnown, kBeingWritten };

// Of a page and KV head. make(to) makes it; `own` is memory for it, of a cache that keeps nothing,
// too.
template <class Make>
const uint16_t* page_summary(const ops::KvLayer& kv, int64_t page, int64_t head, uint16_t* own,
                             Make&& make) {
  const auto made = [&](uint16_t* to) {
    make(to);
    return to;
  };
  const ops::PageBounds& bounds = kv.bounds;
  if (bounds.values == nullptr) return made(own);
  uint16_t* kept = bounds.of(page, head, kv.num_kv_heads, kv.head_dim);
  std::atomic_ref<int32_t> known(bounds.known[page * bounds.known_stride + head]);
  if (known.load(std::memory_order_acquire) == kKnown) return kept;
  int32_t expected = kUnknown;
  const bool writes =
      known.compare_exchange_strong(expected, kBeingWritten, std::memory_order_acquire);
  if (!writes) return expected == kKnown ? kept : made(own);
  make(kept);
  known.store(kKnown, std::memory_order_release);
  return kept;
}

}  // namespace effinfer::cpu
