// Which keys a sequence has: retain, reorder, evict, merge, reposition. Each checks everything
// first, then makes the pages that it changes the sequence's own, then changes them.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "effinfer/error.h"
#include "kv/kv_cache_impl.h"

namespace effinfer {
namespace {

using kv::PageTable;
using kv::Sequence;

constexpr int64_t kPage = KvCache::kPageSize;

[[noreturn]] void fail(const char* verb, const std::string& what) {
  throw InvalidArgument(std::string("[kv_cache] ") + verb + ": " + what);
}

std::string range(int64_t begin, int64_t end) {
  return std::to_string(begin) + ".." + std::to_string(end - 1);
}

void require_committed(const char* verb, const Sequence& sequence) {
  if (sequence.uncommitted() == 0) return;
  fail(verb, "expected every token committed, got " + std::to_string(sequence.committed) + " of " +
                 std::to_string(sequence.length()));
}

void require_slots(const char* verb, const std::string& what, std::span<const int32_t> slots,
                   int64_t end, bool ascending) {
  int64_t least = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < least || slots[i] >= end) {
      fail(verb, what + "[" + std::to_string(i) + "]: expected " + range(least, end) + ", got " +
                     std::to_string(slots[i]));
    }
    if (ascending) least = int64_t{slots[i]} + 1;
  }
}

// The slots before the result stay where they are, in every head.
int64_t checked_lists(std::span<const std::vector<int32_t>> slots, size_t heads,
                      int64_t num_slots) {
  if (slots.size() != 1 && slots.size() != heads) {
    fail("retain", "slots: expected 1 or " + std::to_string(heads) + " lists, got " +
                       std::to_string(slots.size()));
  }
  const size_t count = slots[0].size();
  if (count == 0) fail("retain", "slots: expected at least one slot, got none");
  auto first = static_cast<int64_t>(count);
  for (size_t head = 0; head < slots.size(); ++head) {
    const std::string what = "slots[" + std::to_string(head) + "]";
    if (slots[head].size() != count) {
      fail("retain", what + ": expected " + std::to_string(count) +
                         " slots as the first has, got " + std::to_string(slots[head].size()));
    }
    require_slots("retain", what, slots[head], num_slots, true);
    int64_t same = 0;
    while (same < first && slots[head][static_cast<size_t>(same)] == same) ++same;
    first = same;
  }
  return first;
}

// The first slot that changes, and the one behind the last one: equal where none does.
std::pair<int64_t, int64_t> checked_orders(std::span<const std::vector<int32_t>> slots,
                                           size_t heads, int64_t num_slots) {
  if (slots.size() != 1 && slots.size() != heads) {
    fail("reorder", "slots: expected 1 or " + std::to_string(heads) + " lists, got " +
                        std::to_string(slots.size()));
  }
  int64_t first = num_slots, end = 0;
  std::vector<bool> is_there;
  for (size_t head = 0; head < slots.size(); ++head) {
    const std::string what = "slots[" + std::to_string(head) + "]";
    const std::vector<int32_t>& list = slots[head];
    if (static_cast<int64_t>(list.size()) != num_slots) {
      fail("reorder", what + ": expected all " + std::to_string(num_slots) + " slots, got " +
                          std::to_string(list.size()));
    }
    require_slots("reorder", what, list, num_slots, false);
    is_there.assign(list.size(), false);
    for (size_t i = 0; i < list.size(); ++i) {
      const auto slot = static_cast<size_t>(list[i]);
      if (is_there[slot]) {
        fail("reorder", what + ": expected each slot once, got " + std::to_string(slot) + " twice");
      }
      is_there[slot] = true;
      if (slot == i) continue;
      first = std::min(first, static_cast<int64_t>(i));
      end = std::max(end, static_cast<int64_t>(i) + 1);
    }
  }
  return {std::min(first, end), end};
}

// The first and the last slot that is written.
std::pair<int64_t, int64_t> checked_merges(std::span<const KvMerge> merges, int64_t heads,
                                           int64_t num_slots) {
  int64_t first = num_slots;
  int64_t last = -1;
  for (size_t i = 0; i < merges.size(); ++i) {
    const KvMerge& merge = merges[i];
    const std::string what = "merges[" + std::to_string(i) + "].";
    if (merge.head < 0 || merge.head >= heads) {
      fail("merge",
           what + "head: expected " + range(0, heads) + ", got " + std::to_string(merge.head));
    }
    require_slots("merge", what + "into", {&merge.into, 1}, num_slots, false);
    require_slots("merge", what + "slots", merge.slots, num_slots, true);
    if (merge.slots.empty() || merge.weights.size() != merge.slots.size()) {
      fail("merge", what + "weights: expected one for each of at least one slot, got " +
                        std::to_string(merge.weights.size()) + " for " +
                        std::to_string(merge.slots.size()));
    }
    for (const float weight : merge.weights) {
      if (!std::isfinite(weight)) fail("merge", what + "weights: expected finite ones");
    }
    first = std::min<int64_t>(first, merge.into);
    last = std::max<int64_t>(last, merge.into);
  }
  return {first, last};
}

kv::HeadPlace head_of(const KvCacheConfig& config, int32_t number) {
  return {number / config.num_kv_heads, number % config.num_kv_heads};
}

}  // namespace

// Makes pages [first, end) of a table, which are about to change, nobody else's. Throws
// OutOfMemory, with nothing changed but cached prefixes.
void KvCache::Impl::own_pages(const char* verb, PageTable& table, size_t group, size_t first,
                              size_t end) {
  const auto count_shared = [&] {
    size_t shared = 0;
    for (size_t i = first; i < end; ++i) shared += is_shared(table.pages[i], group) ? 1 : 0;
    return shared;
  };
  size_t shared = count_shared();
  if (!has_pages(group, shared)) {
    tree.clear();  // of its own prefix, too, which nobody may have but the tree
    shared = count_shared();
  }
  if (!has_pages(group, shared)) {
    throw OutOfMemory(std::string("[kv_cache] ") + verb + ": " + std::to_string(shared) +
                      " pages needed for copies of shared ones, " +
                      std::to_string(pool(group).free_pages() + tree.evictable(group)) +
                      " available");
  }
  make_free(group, shared);
  for (size_t i = first; i < end; ++i) {
    int32_t& page = table.pages[i];
    if (!is_shared(page, group)) {  // also when the tree has let go of it meanwhile
      if (page == kv::kFreed) continue;
      pool(group).forget_coding(page);
      pool(group).forget_bounds(page);
      continue;
    }
    const int32_t copy = pool(group).allocate_copy(page);
    pool(group).release(page);
    page = copy;
  }
}

bool KvCache::Impl::is_shared(int32_t page, size_t group) const {
  return page != kv::kFreed && pool(group).references(page) > 1;
}

size_t KvCache::Impl::checked_group(const char* verb, int32_t group) const {
  const auto place = static_cast<size_t>(group);
  const bool is_known = group >= 0 && place < pools.size();
  if (is_known && window_of(place) < 0) return place;
  fail(verb, "group: expected one of " + range(0, static_cast<int64_t>(pools.size())) +
                 " without a window (of windows pages are freed as they move), got " +
                 std::to_string(group));
}

void KvCache::Impl::require_movable(const char* verb) const {
  if (!config.fixed_slots) return;
  throw Unsupported(std::string("[kv_cache] ") + verb +
                    ": keys in chunks are rotated by their places, so they stay in their slots");
}

void KvCache::retain(SequenceId id, int32_t group, std::span<const std::vector<int32_t>> slots) {
  impl_->require_movable("retain");
  Sequence& sequence = impl_->find_plain("retain", id);
  const size_t place = impl_->checked_group("retain", group);
  require_committed("retain", sequence);
  PageTable& table = sequence.tables[place];
  kv::PagePool& pool = impl_->pool(place);
  const size_t heads = pool.layers().size() * static_cast<size_t>(config().num_kv_heads);
  const int64_t first = checked_lists(slots, heads, table.slots);
  const size_t count = slots[0].size();
  if (static_cast<int64_t>(count) == table.slots) return;
  const size_t pages = pages_for(count);
  if (first < static_cast<int64_t>(count)) {
    impl_->own_pages("retain", table, place, static_cast<size_t>(first / kPage), pages);
    pool.retain(table.pages, first, slots);
  }
  for (kv::Plane& plane : sequence.planes) plane.retain(impl_->plane_rows(place), slots);
  table.slots = static_cast<int64_t>(count);
  impl_->release_pages(table, place, pages);
  sequence.leave_prefix();
}

void KvCache::reorder(SequenceId id, int32_t group, std::span<const std::vector<int32_t>> slots) {
  impl_->require_movable("reorder");
  Sequence& sequence = impl_->find_plain("reorder", id);
  const size_t place = impl_->checked_group("reorder", group);
  require_committed("reorder", sequence);
  PageTable& table = sequence.tables[place];
  kv::PagePool& pool = impl_->pool(place);
  const size_t heads = pool.layers().size() * static_cast<size_t>(config().num_kv_heads);
  const auto [first, end] = checked_orders(slots, heads, table.slots);
  if (first == end) return;
  impl_->own_pages("reorder", table, place, static_cast<size_t>(first / kPage),
                   pages_for(static_cast<size_t>(end)));
  pool.reorder(table.pages, first, end, slots);
  for (kv::Plane& plane : sequence.planes) plane.reorder(impl_->plane_rows(place), slots);
  sequence.leave_prefix();
}

void KvCache::evict(SequenceId id, int32_t group, int64_t begin, int64_t end) {
  impl_->require_movable("evict");
  Sequence& sequence = impl_->find_plain("evict", id);
  const size_t place = impl_->checked_group("evict", group);
  require_committed("evict", sequence);
  PageTable& table = sequence.tables[place];
  const int64_t count = end - begin;
  if (begin < 0 || count < 0 || end > table.slots || count == table.slots) {
    fail("evict", "slots: expected 0 <= begin <= end <= " + std::to_string(table.slots) +
                      ", not all, got [" + std::to_string(begin) + ", " + std::to_string(end) +
                      ")");
  }
  if (count == 0) return;
  if (count % kPage == 0 && end < table.slots) {
    const int64_t slots = table.slots;
    impl_->evict_pages(table, place, begin, end);
    for (kv::Plane& plane : sequence.planes) {
      plane.evict(impl_->plane_rows(place), begin, end, slots);
    }
    return sequence.leave_prefix();
  }
  std::vector<std::vector<int32_t>> kept(1);
  for (int64_t i = 0; i < table.slots; ++i) {
    if (i < begin || i >= end) kept[0].push_back(static_cast<int32_t>(i));
  }
  retain(id, group, kept);
}

// Whole pages behind the gap keep their contents and move in the table. Of the page that the gap
// begins in and the one that it ends in one page is made: the fewer tokens move.
void KvCache::Impl::evict_pages(PageTable& table, size_t group, int64_t begin, int64_t end) {
  const auto first = static_cast<size_t>(begin / kPage);
  const auto last = static_cast<size_t>(end / kPage);
  const int64_t before = begin % kPage;  // tokens of the first page that stay
  const int64_t behind = std::min(table.slots - static_cast<int64_t>(last) * kPage, kPage);
  size_t drop = first;  // the page whose tokens go into the other
  if (before > 0) {
    const bool into_last = before <= behind - before;
    const size_t into = into_last ? last : first;
    drop = into_last ? first : last;
    own_pages("evict", table, group, into, into + 1);
    pool(group).copy_tokens(table.pages[drop], table.pages[into],
                            static_cast<int32_t>(into_last ? 0 : before),
                            static_cast<int32_t>(into_last ? before : behind));
  }
  const size_t gone = drop == last ? first + 1 : first;  // the first of the pages that go
  const auto pages = table.pages.begin() + static_cast<ptrdiff_t>(gone);
  for (size_t i = 0; i < last - first; ++i) pool(group).release(pages[static_cast<ptrdiff_t>(i)]);
  table.pages.erase(pages, pages + static_cast<ptrdiff_t>(last - first));
  table.slots -= end - begin;
}

void KvCache::merge(SequenceId id, int32_t group, std::span<const KvMerge> merges) {
  Sequence& sequence = impl_->find_plain("merge", id);
  const size_t place = impl_->checked_group("merge", group);
  require_committed("merge", sequence);
  PageTable& table = sequence.tables[place];
  kv::PagePool& pool = impl_->pool(place);
  const auto heads = static_cast<int64_t>(pool.layers().size()) * int64_t{config().num_kv_heads};
  if (merges.empty()) return;
  const auto [first, last] = checked_merges(merges, heads, table.slots);
  impl_->own_pages("merge", table, place, static_cast<size_t>(first / kPage),
                   static_cast<size_t>(last / kPage) + 1);
  for (const KvMerge& merge : merges) pool.merge(table.pages, head_of(config(), merge.head), merge);
  sequence.leave_prefix();
}

void KvCache::read(SequenceId id, int32_t group, int32_t head, std::span<float> keys,
                   std::span<float> values) const {
  const Sequence& sequence = impl_->find_plain("read", id);
  const size_t place = impl_->checked_group("read", group);
  require_committed("read", sequence);
  const PageTable& table = sequence.tables[place];
  const kv::PagePool& pool = impl_->pool(place);
  const auto heads = static_cast<int64_t>(pool.layers().size()) * int64_t{config().num_kv_heads};
  if (head < 0 || head >= heads) {
    fail("read", "head: expected " + range(0, heads) + ", got " + std::to_string(head));
  }
  const auto dim = static_cast<size_t>(config().head_dim);
  const size_t size = static_cast<size_t>(table.slots) * dim;
  for (const size_t given : {keys.size(), values.size()}) {
    if (given == 0 || given == size) continue;
    fail("read", "keys and values: expected " + std::to_string(size) + " floats each, got " +
                     std::to_string(given));
  }
  pool.read(table.pages, table.slots, head_of(config(), head), keys.empty() ? nullptr : keys.data(),
            values.empty() ? nullptr : values.data());
}

void KvCache::reposition(SequenceId id, std::span<const int64_t> from, int64_t delta) {
  impl_->require_movable("reposition");
  Sequence& sequence = impl_->find_plain("reposition", id);
  require_committed("reposition", sequence);
  const size_t groups = sequence.tables.size();
  if (config().rope.size() != static_cast<size_t>(config().num_layers)) {
    throw Unsupported("[kv_cache] reposition: the config does not say how keys are rotated");
  }
  if (from.size() != 1 && from.size() != groups) {
    fail("reposition", "from: expected 1 or " + std::to_string(groups) + " slots, got " +
                           std::to_string(from.size()));
  }
  const int64_t next = sequence.length() + sequence.shift;
  constexpr int64_t kMost = int64_t{1} << 31;
  if (delta < -next || delta >= kMost - next) {
    fail("reposition",
         "delta: expected " + range(-next, kMost - next) + ", got " + std::to_string(delta));
  }
  std::vector<int64_t> first(groups);
  for (size_t group = 0; group < groups; ++group) {
    first[group] = from[from.size() == 1 ? 0 : group];
    const int64_t slots = sequence.tables[group].slots;
    if (first[group] < 0 || first[group] > slots) {
      fail("reposition", "from: expected " + range(0, slots + 1) + " in group " +
                             std::to_string(group) + ", got " + std::to_string(first[group]));
    }
  }
  if (delta == 0) return;
  for (size_t group = 0; group < groups; ++group) {
    PageTable& table = sequence.tables[group];
    first[group] = std::max(first[group], static_cast<int64_t>(table.num_freed()) * kPage);
    impl_->own_pages("reposition", table, group, static_cast<size_t>(first[group] / kPage),
                     table.pages.size());
  }
  for (size_t group = 0; group < groups; ++group) {
    impl_->rotate(sequence.tables[group], group, first[group], delta);
  }
  sequence.shift += delta;
  sequence.leave_prefix();
}

}  // namespace effinfer
