#include "effinfer/kv_cache.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "effinfer/error.h"
#include "kv/kv_access.h"
#include "kv/page_pool.h"
#include "kv/radix_tree.h"

namespace effinfer {
namespace {

struct Sequence {
  std::vector<int32_t> tokens;
  std::vector<int32_t> pages;  // ceil(tokens / 64)
  int64_t committed = 0;
  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
};

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

}  // namespace

struct KvCache::Impl {
  kv::PagePool pool;
  kv::RadixTree tree;
  std::unordered_map<SequenceId, Sequence> sequences;
  SequenceId next_id = 0;

  explicit Impl(const KvCacheConfig& config) : pool(config), tree(pool) {}

  const Sequence& find(SequenceId id) const {
    const auto found = sequences.find(id);
    if (found == sequences.end()) {
      throw InvalidArgument("[kv_cache] sequence: no sequence " + std::to_string(id));
    }
    return found->second;
  }
  Sequence& find(SequenceId id) {
    return const_cast<Sequence&>(static_cast<const Impl*>(this)->find(id));
  }

  // The last page is partly filled and someone else reads it: appending must copy it first.
  bool must_copy(const Sequence& sequence) const {
    return sequence.tokens.size() % kPageSize != 0 && pool.references(sequence.pages.back()) > 1;
  }
  size_t pages_needed(const Sequence& sequence, size_t count) const {
    if (count == 0) return 0;
    const size_t total = pages_for(sequence.tokens.size() + count);
    return total - sequence.pages.size() + (must_copy(sequence) ? 1 : 0);
  }
  bool has_pages(size_t count) const {
    const size_t free = static_cast<size_t>(pool.free_pages());
    return count <= free || count <= free + static_cast<size_t>(tree.evictable());
  }
  void shorten(Sequence& sequence, size_t length) {
    sequence.tokens.resize(length);
    while (sequence.pages.size() > pages_for(length)) {
      pool.release(sequence.pages.back());
      sequence.pages.pop_back();
    }
  }
  void publish(const Sequence& sequence) {
    const size_t whole = static_cast<size_t>(sequence.committed) / kPageSize;
    tree.insert(sequence.tokens, std::span(sequence.pages).first(whole));
  }
};

KvCache::KvCache(const KvCacheConfig& config) : impl_(std::make_unique<Impl>(config)) {}
KvCache::~KvCache() = default;

const KvCacheConfig& KvCache::config() const {
  return impl_->pool.config();
}
size_t KvCache::num_bytes() const {
  return impl_->pool.num_bytes();
}
int32_t KvCache::free_pages() const {
  return impl_->pool.free_pages();
}
int32_t KvCache::available_pages() const {
  return impl_->pool.free_pages() + impl_->tree.evictable();
}
int32_t KvCache::cached_prefix_pages() const {
  return impl_->tree.size();
}

SequenceId KvCache::create(std::span<const int32_t> tokens, int32_t* cached) {
  Sequence sequence;
  if (!tokens.empty()) {
    sequence.pages = impl_->tree.match(tokens, (tokens.size() - 1) / kPageSize);
  }
  const size_t known = sequence.pages.size() * kPageSize;
  sequence.tokens.assign(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(known));
  sequence.committed = sequence.length();
  for (const int32_t page : sequence.pages) impl_->pool.retain(page);
  if (cached != nullptr) *cached = static_cast<int32_t>(known);
  const SequenceId id = impl_->next_id++;
  impl_->sequences.emplace(id, std::move(sequence));
  return id;
}

bool KvCache::can_append(SequenceId id, int64_t count) const {
  if (count < 0) require_count("can_append", count, 0);
  return impl_->has_pages(impl_->pages_needed(impl_->find(id), static_cast<size_t>(count)));
}

void KvCache::append(SequenceId id, std::span<const int32_t> tokens) {
  Sequence& sequence = impl_->find(id);
  const size_t needed = impl_->pages_needed(sequence, tokens.size());
  if (!impl_->has_pages(needed)) {
    throw OutOfMemory("[kv_cache] append: " + std::to_string(needed) + " pages needed, " +
                      std::to_string(available_pages()) + " of " +
                      std::to_string(impl_->pool.num_pages()) + " available");
  }
  if (tokens.empty()) return;
  make_room(sequence.pages, needed);
  make_room(sequence.tokens, tokens.size());
  while (static_cast<size_t>(impl_->pool.free_pages()) < needed) impl_->tree.evict();
  if (impl_->must_copy(sequence)) {
    const int32_t shared = sequence.pages.back();
    sequence.pages.back() = impl_->pool.allocate_copy(shared);
    impl_->pool.release(shared);
  }
  const size_t total = pages_for(sequence.tokens.size() + tokens.size());
  while (sequence.pages.size() < total) sequence.pages.push_back(impl_->pool.allocate());
  sequence.tokens.insert(sequence.tokens.end(), tokens.begin(), tokens.end());
}

void KvCache::reserve(SequenceId id, int64_t tokens) {
  Sequence& sequence = impl_->find(id);
  const int64_t most = int64_t{config().num_pages} * kPageSize;
  const auto size = static_cast<size_t>(std::clamp<int64_t>(tokens, 0, most));
  sequence.tokens.reserve(size);
  sequence.pages.reserve(pages_for(size));
}

void KvCache::commit(SequenceId id, int64_t count) {
  Sequence& sequence = impl_->find(id);
  require_count("commit", count, sequence.length() - sequence.committed);
  sequence.committed += count;
}

void KvCache::keep(SequenceId id, std::span<const int32_t> rows) {
  Sequence& sequence = impl_->find(id);
  require_rows(rows, sequence.length() - sequence.committed);
  const auto first = static_cast<size_t>(sequence.committed);
  impl_->pool.close_up(sequence.pages, sequence.committed, rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    sequence.tokens[first + i] = sequence.tokens[first + static_cast<size_t>(rows[i])];
  }
  impl_->shorten(sequence, first + rows.size());
  sequence.committed = sequence.length();
}

SequenceId KvCache::fork(SequenceId id) {
  Sequence copy = impl_->find(id);
  if (copy.committed != copy.length()) {
    throw InvalidArgument("[kv_cache] fork: expected every token committed, got " +
                          std::to_string(copy.committed) + " of " + std::to_string(copy.length()));
  }
  for (const int32_t page : copy.pages) impl_->pool.retain(page);
  const SequenceId forked = impl_->next_id++;
  impl_->sequences.emplace(forked, std::move(copy));
  return forked;
}

void KvCache::rollback(SequenceId id, int64_t count) {
  Sequence& sequence = impl_->find(id);
  require_count("rollback", count, sequence.length());
  impl_->shorten(sequence, sequence.tokens.size() - static_cast<size_t>(count));
  sequence.committed = std::min(sequence.committed, sequence.length());
}

void KvCache::publish(SequenceId id) {
  impl_->publish(impl_->find(id));
}

void KvCache::release(SequenceId id, bool keep_prefix) {
  Sequence& sequence = impl_->find(id);
  if (keep_prefix) impl_->publish(sequence);
  // The last page goes first, so that the pages of a prompt's start are on top of the free stack.
  for (size_t i = sequence.pages.size(); i-- > 0;) impl_->pool.release(sequence.pages[i]);
  impl_->sequences.erase(id);
}

void KvCache::clear_prefixes() {
  impl_->tree.clear();
}

int64_t KvCache::length(SequenceId id) const {
  return impl_->find(id).length();
}
int64_t KvCache::committed(SequenceId id) const {
  return impl_->find(id).committed;
}
std::span<const int32_t> KvCache::pages(SequenceId id) const {
  return impl_->find(id).pages;
}
std::span<const int32_t> KvCache::tokens(SequenceId id) const {
  return impl_->find(id).tokens;
}

void KvCache::check_integrity() const {
  std::vector<int32_t> references(static_cast<size_t>(impl_->pool.num_pages()), 0);
  for (const auto& [id, sequence] : impl_->sequences) {
    const std::string label = "[kv_cache] sequence " + std::to_string(id) + ": ";
    if (sequence.pages.size() != pages_for(sequence.tokens.size())) {
      throw InternalError(label + std::to_string(sequence.pages.size()) + " pages for " +
                          std::to_string(sequence.tokens.size()) + " tokens");
    }
    if (sequence.committed < 0 || sequence.committed > sequence.length()) {
      throw InternalError(label + "committed " + std::to_string(sequence.committed));
    }
    for (size_t i = 0; i < sequence.pages.size(); ++i) {
      const int32_t page = sequence.pages[i];
      if (page < 0 || page >= impl_->pool.num_pages()) {
        throw InternalError(label + "page " + std::to_string(page) + " is not of the pool");
      }
      ++references[static_cast<size_t>(page)];
      // What a step will write into has one reader.
      const int64_t end =
          std::min<int64_t>(static_cast<int64_t>(i + 1) * kPageSize, sequence.length());
      if (sequence.committed < end && impl_->pool.references(page) != 1) {
        throw InternalError(label + "page " + std::to_string(page) + " is written and shared");
      }
    }
    std::vector<int32_t> sorted = sequence.pages;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      throw InternalError(label + "a page appears twice");
    }
  }
  impl_->tree.check(references);
  impl_->pool.check(references);
}

std::span<const ops::KvLayer> KvCacheAccess::layers(const KvCache& cache) {
  return cache.impl_->pool.layers();
}

}  // namespace effinfer
