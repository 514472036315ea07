#include "effinfer/kv_cache.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "effinfer/error.h"
#include "kv/groups.h"
#include "kv/kv_access.h"
#include "kv/kv_cache_impl.h"

namespace effinfer {

using kv::PageTable;
using kv::Sequence;

namespace {

// Room for `count` more. reserve() alone takes no more than it is asked for: a sequence that grows
// token by token would move all of them each time.
void make_room(std::vector<int32_t>& values, size_t count) {
  const size_t size = values.size() + count;
  if (size > values.capacity()) values.reserve(std::max(size, 2 * values.capacity()));
}

void require_count(const char* verb, int64_t count, int64_t limit) {
  if (count >= 0 && count <= limit) return;
  throw InvalidArgument(std::string("[kv_cache] ") + verb + ": count: expected 0.." +
                        std::to_string(limit) + ", got " + std::to_string(count));
}

void require_rows(std::span<const int32_t> rows, int64_t end) {
  int64_t least = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] < least || rows[i] >= end) {
      throw InvalidArgument("[kv_cache] keep: rows[" + std::to_string(i) + "]: expected " +
                            std::to_string(least) + ".." + std::to_string(end - 1) + ", got " +
                            std::to_string(rows[i]));
    }
    least = int64_t{rows[i]} + 1;
  }
}

// A unit is whole pages.
kv::Making making_of(const PrefixKey& key) {
  const int64_t unit = std::lcm(key.unit, int64_t{KvCache::kPageSize});
  return {key.methods, static_cast<size_t>(unit / KvCache::kPageSize)};
}

size_t pages_of(int64_t slots) {
  return KvCache::pages_for(static_cast<size_t>(slots));
}

}  // namespace

KvCache::Impl::Impl(const KvCacheConfig& given)
    : config(given),
      pools(kv::make_pools(given)),
      layers(kv::layers_of(pools, given)),
      group_of_layer(kv::group_of_layer(given)),
      plane_heads(kv::plane_heads(given)),
      tree(pools, kv::windows_of(given)) {}

Device KvCache::Impl::plane_device() const {
  for (const Device device : config.layer_devices) {
    if (device.kind != DeviceKind::cpu) return device;
  }
  return config.device;
}

const Sequence& KvCache::Impl::find(SequenceId id) const {
  const auto found = sequences.find(id);
  if (found == sequences.end()) {
    throw InvalidArgument("[kv_cache] sequence: no sequence " + std::to_string(id));
  }
  return found->second;
}

const PageTable& KvCache::Impl::table(SequenceId id, int32_t group) const {
  const Sequence& sequence = find(id);
  if (group >= 0 && static_cast<size_t>(group) < sequence.tables.size()) {
    return sequence.tables[static_cast<size_t>(group)];
  }
  throw InvalidArgument("[kv_cache] group: expected 0.." +
                        std::to_string(sequence.tables.size() - 1) + ", got " +
                        std::to_string(group));
}

int64_t KvCache::Impl::most_slots(const Sequence& sequence) const {
  int64_t most = 0;
  for (size_t group = 0; group < num_whole_groups(); ++group) {
    most = std::max(most, sequence.tables[group].slots);
  }
  return most;
}

bool KvCache::Impl::must_copy(const PageTable& table, size_t group) const {
  return table.slots % kPageSize != 0 && pool(group).references(table.pages.back()) > 1;
}

size_t KvCache::Impl::pages_needed(const PageTable& table, size_t group, int64_t count) const {
  if (count == 0) return 0;
  return pages_of(table.slots + count) - table.pages.size() + (must_copy(table, group) ? 1 : 0);
}

bool KvCache::Impl::has_pages(size_t group, size_t count) const {
  const auto free = static_cast<size_t>(pool(group).free_pages());
  return count <= free || count <= free + static_cast<size_t>(tree.evictable(group));
}

void KvCache::Impl::make_free(size_t group, size_t count) {
  while (static_cast<size_t>(pool(group).free_pages()) < count) tree.evict();
}

// Its pages are free.
void KvCache::Impl::append_slots(PageTable& table, size_t group, int64_t count) {
  if (must_copy(table, group)) {
    const int32_t shared = table.pages.back();
    table.pages.back() = pool(group).allocate_copy(shared);
    pool(group).release(shared);
  } else if (table.slots % kPageSize != 0) {
    pool(group).begin_to_fill(table.pages.back());
  }
  const auto first = static_cast<size_t>(table.slots / kPageSize);
  table.slots += count;
  const size_t total = pages_of(table.slots);
  while (table.pages.size() < total) table.pages.push_back(pool(group).allocate());
  const auto full = static_cast<size_t>(table.slots / kPageSize);
  for (size_t i = first; i < full; ++i) pool(group).end_filling(table.pages[i]);
}

void KvCache::Impl::release_pages(PageTable& table, size_t group, size_t from) {
  while (table.pages.size() > from) {
    if (table.pages.back() != kv::kFreed) pool(group).release(table.pages.back());
    table.pages.pop_back();
  }
}

void KvCache::Impl::shorten(Sequence& sequence, int64_t count) {
  sequence.tokens.resize(sequence.tokens.size() - static_cast<size_t>(count));
  for (size_t group = 0; group < sequence.tables.size(); ++group) {
    PageTable& table = sequence.tables[group];
    table.slots -= count;
    release_pages(table, group, pages_of(table.slots));
  }
}

void KvCache::Impl::publish(const Sequence& sequence, size_t pages) {
  if (!sequence.is_prefix || num_encoded(sequence.tables.front()) > 0) return;
  std::vector<kv::RadixTree::GroupPages> groups;
  for (const PageTable& table : sequence.tables) {
    const auto first = static_cast<size_t>(sequence.first_token(table) / kPageSize);
    groups.push_back({table.pages, first});
  }
  tree.insert(sequence.tokens, pages, groups, making_of(sequence.key));
}

void KvCache::Impl::close_windows(Sequence& sequence) {
  const auto wanted = static_cast<int64_t>(sequence.wanted_prefix) * kPageSize;
  if (wanted > 0 && sequence.committed >= wanted) {
    publish(sequence, sequence.wanted_prefix);
    sequence.wanted_prefix = 0;
  }
  for (size_t group = num_whole_groups(); group < sequence.tables.size(); ++group) {
    PageTable& table = sequence.tables[group];
    const int64_t needed = kv::first_needed_page(window_of(group) + kSlack, sequence.committed) -
                           sequence.first_token(table) / kPageSize;
    if (needed <= 0) continue;
    for (size_t page = table.num_freed(); static_cast<int64_t>(page) < needed; ++page) {
      pool(group).release(table.pages[page]);
      table.pages[page] = kv::kFreed;
    }
    const int64_t gone = needed / kv::kChunkPages * kv::kChunkPages;
    table.pages.erase(table.pages.begin(), table.pages.begin() + gone);
    table.slots -= gone * kPageSize;
  }
}

KvCache::KvCache(const KvCacheConfig& config) : impl_(std::make_unique<Impl>(config)) {}
KvCache::~KvCache() = default;

const KvCacheConfig& KvCache::config() const {
  return impl_->config;
}
size_t KvCache::num_bytes() const {
  size_t bytes = 0;
  for (const auto& pool : impl_->pools) bytes += pool->num_bytes();
  return bytes;
}
int32_t KvCache::free_pages() const {
  int32_t free = impl_->pools.front()->free_pages();
  for (const auto& pool : impl_->pools) free = std::min(free, pool->free_pages());
  return free;
}
int32_t KvCache::available_pages() const {
  int32_t least = config().num_pages;
  for (size_t group = 0; group < impl_->pools.size(); ++group) {
    least = std::min(least, impl_->pool(group).free_pages() + impl_->tree.evictable(group));
  }
  return least;
}
int32_t KvCache::num_groups() const {
  return static_cast<int32_t>(impl_->pools.size());
}
int32_t KvCache::num_whole_groups() const {
  return static_cast<int32_t>(impl_->num_whole_groups());
}
int64_t KvCache::first_plane_head(int32_t group) const {
  if (group < 0 || group > num_whole_groups()) {
    throw InvalidArgument("[kv_cache] first_plane_head: group: expected 0.." +
                          std::to_string(num_whole_groups()) + ", got " + std::to_string(group));
  }
  return impl_->plane_heads[static_cast<size_t>(group)];
}
int32_t KvCache::cached_prefix_pages() const {
  return impl_->tree.size();
}

SequenceId KvCache::create(std::span<const int32_t> tokens, int32_t* cached) {
  return create(tokens, cached, PrefixKey{});
}

SequenceId KvCache::create(std::span<const int32_t> tokens, int32_t* cached, const PrefixKey& key) {
  if (key.unit < 1 || key.most < 0) {
    throw InvalidArgument("[kv_cache] create: key: expected a unit of at least 1 and at least 0 " +
                          std::string("tokens at most, got ") + std::to_string(key.unit) + " and " +
                          std::to_string(key.most));
  }
  Sequence sequence;
  sequence.key = key;
  sequence.tables.resize(impl_->pools.size());
  size_t known = 0;
  if (!tokens.empty()) {
    const auto size = static_cast<int64_t>(tokens.size());
    const int64_t most = std::min({size - 1, key.most, impl_->plain_prefix(key, size)});
    auto prefix = impl_->tree.match(tokens, static_cast<size_t>(most / kPageSize), making_of(key));
    known = prefix.pages * kPageSize;
    if (prefix.known > prefix.pages) sequence.wanted_prefix = prefix.known;
    for (size_t group = 0; group < sequence.tables.size(); ++group) {
      PageTable& table = sequence.tables[group];
      table.pages = std::move(prefix.by_group[group]);
      const size_t gone = table.num_freed() / kv::kChunkPages * kv::kChunkPages;
      table.pages.erase(table.pages.begin(), table.pages.begin() + static_cast<ptrdiff_t>(gone));
      table.slots = static_cast<int64_t>(table.pages.size()) * kPageSize;
      for (const int32_t page : table.pages) {
        if (page != kv::kFreed) impl_->pool(group).retain(page);
      }
    }
  }
  sequence.tokens.assign(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(known));
  sequence.committed = sequence.length();
  if (cached != nullptr) *cached = static_cast<int32_t>(known);
  const SequenceId id = impl_->next_id++;
  impl_->sequences.emplace(id, std::move(sequence));
  return id;
}

bool KvCache::can_append(SequenceId id, int64_t count) const {
  if (count < 0) require_count("can_append", count, 0);
  const Sequence& sequence = impl_->find(id);
  for (size_t group = 0; group < sequence.tables.size(); ++group) {
    const size_t needed = impl_->pages_needed(sequence.tables[group], group, count);
    if (!impl_->has_pages(group, needed)) return false;
  }
  return true;
}

void KvCache::append(SequenceId id, std::span<const int32_t> tokens) {
  Sequence& sequence = impl_->find(id);
  const auto count = static_cast<int64_t>(tokens.size());
  for (size_t group = 0; group < sequence.tables.size(); ++group) {
    const size_t needed = impl_->pages_needed(sequence.tables[group], group, count);
    if (impl_->has_pages(group, needed)) continue;
    throw OutOfMemory("[kv_cache] append: " + std::to_string(needed) + " pages needed, " +
                      std::to_string(available_pages()) + " of " +
                      std::to_string(config().num_pages) + " available");
  }
  if (tokens.empty()) return;
  make_room(sequence.tokens, tokens.size());
  for (size_t group = 0; group < sequence.tables.size(); ++group) {
    PageTable& table = sequence.tables[group];
    const size_t needed = impl_->pages_needed(table, group, count);
    make_room(table.pages, needed);
    impl_->make_free(group, needed);
    impl_->append_slots(table, group, count);
    if (group >= impl_->num_whole_groups()) continue;
    for (kv::Plane& plane : sequence.planes) {
      plane.add(impl_->plane_rows(group), table.slots - count, table.slots);
    }
  }
  sequence.tokens.insert(sequence.tokens.end(), tokens.begin(), tokens.end());
}

void KvCache::reserve(SequenceId id, int64_t tokens) {
  Sequence& sequence = impl_->find(id);
  const int64_t most = int64_t{config().num_pages} * kPageSize;
  const auto size = static_cast<size_t>(std::clamp<int64_t>(tokens, 0, most));
  sequence.tokens.reserve(size);
  for (PageTable& table : sequence.tables) table.pages.reserve(pages_for(size));
}

void KvCache::commit(SequenceId id, int64_t count) {
  Sequence& sequence = impl_->find(id);
  require_count("commit", count, sequence.uncommitted());
  sequence.committed += count;
  if (sequence.tables.size() > 1) impl_->close_windows(sequence);
}

void KvCache::keep(SequenceId id, std::span<const int32_t> rows) {
  Sequence& sequence = impl_->find(id);
  const int64_t count = sequence.uncommitted();
  require_rows(rows, count);
  for (size_t group = 0; group < sequence.tables.size(); ++group) {
    const PageTable& table = sequence.tables[group];
    impl_->pool(group).close_up(table.pages, table.slots - count, rows);
    if (group >= impl_->num_whole_groups()) continue;
    for (kv::Plane& plane : sequence.planes) {
      plane.close_up(impl_->plane_rows(group), table.slots - count, rows);
    }
  }
  const auto first = static_cast<size_t>(sequence.committed);
  for (size_t i = 0; i < rows.size(); ++i) {
    sequence.tokens[first + i] = sequence.tokens[first + static_cast<size_t>(rows[i])];
  }
  impl_->shorten(sequence, count - static_cast<int64_t>(rows.size()));
  sequence.committed = sequence.length();
  if (sequence.tables.size() > 1) impl_->close_windows(sequence);
}

SequenceId KvCache::fork(SequenceId id) {
  Sequence copy = impl_->find(id);
  if (copy.uncommitted() != 0) {
    throw InvalidArgument("[kv_cache] fork: expected every token committed, got " +
                          std::to_string(copy.committed) + " of " + std::to_string(copy.length()));
  }
  copy.wanted_prefix = 0;
  for (size_t group = 0; group < copy.tables.size(); ++group) {
    for (const int32_t page : copy.tables[group].pages) {
      if (page != kv::kFreed) impl_->pool(group).retain(page);
    }
  }
  const SequenceId forked = impl_->next_id++;
  impl_->sequences.emplace(forked, std::move(copy));
  return forked;
}

bool KvCache::can_rollback(SequenceId id, int64_t count) const {
  const Sequence& sequence = impl_->find(id);
  const int64_t length = sequence.length() - count;
  if (count < 0 || length < sequence.fixed || count > impl_->plain_slots(sequence)) return false;
  for (size_t group = impl_->num_whole_groups(); group < sequence.tables.size(); ++group) {
    const PageTable& table = sequence.tables[group];
    const int64_t first_page =
        sequence.first_token(table) / kPageSize + static_cast<int64_t>(table.num_freed());
    if (first_page > kv::first_needed_page(impl_->window_of(group), length)) return false;
  }
  return true;
}

void KvCache::rollback(SequenceId id, int64_t count) {
  Sequence& sequence = impl_->find(id);
  require_count("rollback", count,
                std::min(sequence.length() - sequence.fixed, impl_->plain_slots(sequence)));
  if (!can_rollback(id, count)) {
    throw InvalidArgument("[kv_cache] rollback: count: expected at most " +
                          std::to_string(int64_t{kSlack} + sequence.uncommitted()) +
                          " (what a window's freed keys allow), got " + std::to_string(count));
  }
  impl_->shorten(sequence, count);
  sequence.committed = std::min(sequence.committed, sequence.length());
}

void KvCache::publish(SequenceId id) {
  const Sequence& sequence = impl_->find(id);
  const int64_t tokens =
      impl_->plain_prefix(sequence.key, std::min(sequence.committed, sequence.key.most));
  const size_t unit = making_of(sequence.key).unit;
  impl_->publish(sequence, static_cast<size_t>(tokens) / kPageSize / unit * unit);
}

void KvCache::release(SequenceId id, bool keep_prefix) {
  Sequence& sequence = impl_->find(id);
  if (keep_prefix) publish(id);
  // The last page goes first, so that the pages of a prompt's start are on top of the free stack.
  for (size_t group = 0; group < sequence.tables.size(); ++group) {
    impl_->release_pages(sequence.tables[group], group, 0);
  }
  impl_->sequences.erase(id);
}

void KvCache::clear_prefixes() {
  impl_->tree.clear();
}

void KvCache::add_plane(SequenceId id, std::string_view name) {
  Sequence& sequence = impl_->find(id);
  for (const kv::Plane& plane : sequence.planes) {
    if (plane.name != name) continue;
    throw InvalidArgument("[kv_cache] add_plane: name: expected a new one, got \"" + plane.name +
                          "\"");
  }
  kv::Plane& plane = sequence.planes.emplace_back();
  plane.name = name;
  plane.num_heads = impl_->num_plane_heads();
  plane.values = kv::PlaneNumbers(impl_->plane_device());
  plane.add({0, plane.num_heads}, 0, impl_->most_slots(sequence));
}

SlotPlane KvCache::plane(SequenceId id, std::string_view name) {
  Sequence& sequence = impl_->find(id);
  std::string known;
  for (kv::Plane& plane : sequence.planes) {
    if (plane.name == name) {
      const int64_t most = impl_->most_slots(sequence);
      for (size_t group = 0; group < impl_->num_whole_groups(); ++group) {
        plane.add(impl_->plane_rows(group), sequence.tables[group].slots, most);
      }
      return plane.view(most);
    }
    known += (known.empty() ? "" : ", ") + plane.name;
  }
  throw InvalidArgument("[kv_cache] plane: name: expected one of the sequence's (" +
                        (known.empty() ? "it has none" : known) + "), got \"" + std::string(name) +
                        "\"");
}

int64_t KvCache::length(SequenceId id) const {
  return impl_->find(id).length();
}
int64_t KvCache::committed(SequenceId id) const {
  return impl_->find(id).committed;
}
int64_t KvCache::slots(SequenceId id, int32_t group) const {
  return impl_->table(id, group).slots;
}
int64_t KvCache::most_slots(SequenceId id) const {
  return impl_->most_slots(impl_->find(id));
}
int64_t KvCache::free_slots(SequenceId id) const {
  const Sequence& sequence = impl_->find(id);
  int64_t least = int64_t{config().num_pages} * kPageSize;
  for (size_t group = 0; group < sequence.tables.size(); ++group) {
    const PageTable& table = sequence.tables[group];
    const auto pages = static_cast<int64_t>(table.pages.size()) + impl_->pool(group).free_pages();
    least = std::min(least, pages * kPageSize - table.slots);
  }
  return least;
}
int64_t KvCache::next_position(SequenceId id) const {
  const Sequence& sequence = impl_->find(id);
  return sequence.length() + sequence.shift;
}
bool KvCache::is_prefix(SequenceId id) const {
  return impl_->find(id).is_prefix;
}
std::span<const int32_t> KvCache::pages(SequenceId id, int32_t group) const {
  return impl_->table(id, group).pages;
}
std::span<const int32_t> KvCache::tokens(SequenceId id) const {
  return impl_->find(id).tokens;
}

size_t KvCache::used_bytes() const {
  size_t bytes = 0;
  for (const auto& pool : impl_->pools) bytes += pool->used_bytes();
  return bytes;
}

size_t KvCache::used_bytes(SequenceId id) const {
  const Sequence& sequence = impl_->find(id);
  size_t bytes = 0;
  for (size_t group = 0; group < sequence.tables.size(); ++group) {
    for (const int32_t page : sequence.tables[group].pages) {
      if (page != kv::kFreed) bytes += impl_->pool(group).page_bytes(page);
    }
  }
  return bytes;
}

std::span<const ops::KvLayer> KvCacheAccess::layers(const KvCache& cache) {
  return cache.impl_->layers;
}
std::span<const uint8_t> KvCacheAccess::group_of_layer(const KvCache& cache) {
  return cache.impl_->group_of_layer;
}

}  // namespace effinfer
