// Pages behind a sequence's newest tokens in fewer bits.
#include <algorithm>
#include <limits>
#include <string>

#include "effinfer/error.h"
#include "effinfer/threads.h"
#include "kv/kv_cache_impl.h"

namespace effinfer {

using kv::PageTable;
using kv::Sequence;

// The only group whose pages are encoded.
static constexpr size_t kGroup = 0;

size_t KvCache::Impl::num_encoded(const PageTable& table) const {
  size_t count = 0;
  while (count < table.pages.size() && pool(kGroup).is_coded(table.pages[count])) ++count;
  return count;
}

size_t KvCache::Impl::pages_due(int64_t slots) const {
  const int64_t behind = slots - config.coding.residual;
  return encodes() && behind > 0 ? static_cast<size_t>(behind / kPageSize) : 0;
}

int64_t KvCache::Impl::plain_prefix(const PrefixKey& key, int64_t tokens) const {
  return encodes() && key.encodes ? static_cast<int64_t>(pages_due(tokens)) * kPageSize : tokens;
}

int64_t KvCache::Impl::plain_slots(const Sequence& sequence) const {
  const PageTable& table = sequence.tables[kGroup];
  return table.slots - static_cast<int64_t>(num_encoded(table)) * kPageSize;
}

Sequence& KvCache::Impl::find_plain(const char* verb, SequenceId id) {
  Sequence& sequence = find(id);
  if (num_encoded(sequence.tables[kGroup]) == 0) return sequence;
  throw Unsupported(std::string("[kv_cache] ") + verb + ": not of a sequence with encoded pages");
}

// Pages that are due.
std::span<const int32_t> KvCache::Impl::due(const Sequence& sequence) const {
  const PageTable& table = sequence.tables[kGroup];
  const size_t end = pages_due(table.slots - sequence.uncommitted());
  const size_t first = num_encoded(table);
  if (first >= end) return {};
  return std::span(table.pages).subspan(first, end - first);
}

// Of these, those that others hold: what is made of them takes memory beside them.
std::vector<int32_t> KvCache::Impl::encoded_beside(std::span<const int32_t> pages) const {
  std::vector<int32_t> shared;
  for (const int32_t page : pages) {
    if (is_shared(page, kGroup) && pool(kGroup).coding_of(page) < 0) shared.push_back(page);
  }
  return shared;
}

// What cached prefixes hold alone can go.
bool KvCache::Impl::has_room_to_encode(std::span<const int32_t> pages) const {
  const std::vector<int32_t> shared = encoded_beside(pages);
  const auto fits = [&](size_t count) {
    return has_pages(kGroup, pool(kGroup).pages_of(0, count));
  };
  if (fits(shared.size())) return true;
  const std::vector<uint8_t> cached = tree.held();
  const auto stay = [&](int32_t page) {
    return pool(kGroup).references(page) > 2 || cached[static_cast<size_t>(page)] == 0;
  };
  return fits(static_cast<size_t>(std::count_if(shared.begin(), shared.end(), stay)));
}

// There must be some, or cached prefixes that can go.
void KvCache::Impl::make_room_to_encode(std::span<const int32_t> pages) {
  const auto has_room = [&] {
    const size_t needed = pool(kGroup).pages_of(0, encoded_beside(pages).size());
    return static_cast<size_t>(pool(kGroup).free_pages()) >= needed;
  };
  while (!has_room()) {
    if (!tree.evict()) tree.clear();
  }
}

bool KvCache::can_encode(SequenceId id) const {
  return impl_->has_room_to_encode(impl_->due(impl_->find(id)));
}

void KvCache::encode(SequenceId id, ThreadPool& pool) {
  Sequence& sequence = impl_->find(id);
  const std::span<const int32_t> due = impl_->due(sequence);
  if (due.empty()) return;
  if (!impl_->has_room_to_encode(due)) {
    throw OutOfMemory("[kv_cache] encode: no memory is free for those of " +
                      std::to_string(due.size()) + " pages that others need as they are");
  }
  // A GPU has not more pages than that even for a moment.
  if (!config().on_host()) impl_->make_room_to_encode(due);
  const size_t first = impl_->num_encoded(sequence.tables[kGroup]);
  kv::PagePool& pages = impl_->pool(kGroup);
  pages.encode(std::span(sequence.tables[kGroup].pages).subspan(first, due.size()), pool, first);
  while (pages.free_pages() < 0) {
    if (!impl_->tree.evict()) impl_->tree.clear();
  }
}

int64_t KvCache::slots_before_encoding(SequenceId id) const {
  const Sequence& sequence = impl_->find(id);
  if (!impl_->encodes()) return std::numeric_limits<int64_t>::max();
  const int64_t slots = sequence.tables[kGroup].slots - sequence.uncommitted();
  const auto next = static_cast<int64_t>(impl_->pages_due(slots)) + 1;
  return config().coding.residual + next * kPageSize - slots;
}

int64_t KvCache::encoded_pages(SequenceId id) const {
  return static_cast<int64_t>(impl_->num_encoded(impl_->find(id).tables[kGroup]));
}

}  // namespace effinfer
