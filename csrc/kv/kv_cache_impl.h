// The inside of a KvCache, which kv_cache.cpp (life of a sequence), retain.cpp (which keys it has),
// encode.cpp (in how many bits), export.cpp and integrity.cpp share.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "effinfer/kv_cache.h"
#include "kv/page_pool.h"
#include "kv/radix_tree.h"
#include "kv/sequence.h"

namespace effinfer {

struct KvCache::Impl {
  explicit Impl(const KvCacheConfig& given);

  KvCacheConfig config;
  std::vector<std::unique_ptr<kv::PagePool>> pools;  // by group
  std::vector<ops::KvLayer> layers;                  // by number
  std::vector<uint8_t> group_of_layer;
  std::vector<int64_t> plane_heads;  // kv::plane_heads()
  kv::RadixTree tree;
  std::unordered_map<SequenceId, kv::Sequence> sequences;
  SequenceId next_id = 0;

  kv::PagePool& pool(size_t group) const { return *pools[group]; }
  int64_t window_of(size_t group) const {
    return config.groups.empty() ? -1 : config.groups[group].window_left;
  }
  size_t num_whole_groups() const { return plane_heads.size() - 1; }
  int64_t num_plane_heads() const { return plane_heads.back(); }
  // Of a whole group.
  kv::PlaneRows plane_rows(size_t group) const {
    return {plane_heads[group], plane_heads[group + 1]};
  }
  // Of the longest whole table.
  int64_t most_slots(const kv::Sequence& sequence) const;
  // A GPU that writes planes, or the CPU.
  Device plane_device() const;
  const kv::Sequence& find(SequenceId id) const;
  kv::Sequence& find(SequenceId id) {
    return const_cast<kv::Sequence&>(static_cast<const Impl*>(this)->find(id));
  }
  const kv::PageTable& table(SequenceId id, int32_t group) const;

  // The last page is partly filled and someone else reads it: appending must copy it first.
  bool must_copy(const kv::PageTable& table, size_t group) const;
  size_t pages_needed(const kv::PageTable& table, size_t group, int64_t count) const;
  // Whether so many pages are free, or would be with cached prefixes gone.
  bool has_pages(size_t group, size_t count) const;
  // There must be.
  void make_free(size_t group, size_t count);
  void append_slots(kv::PageTable& table, size_t group, int64_t count);
  void shorten(kv::Sequence& sequence, int64_t count);
  void publish(const kv::Sequence& sequence, size_t pages);
  // Frees what windows do not need any more.
  void close_windows(kv::Sequence& sequence);
  void release_pages(kv::PageTable& table, size_t group, size_t from);

  // encode.cpp
  bool encodes() const { return config.coding.bits != 0; }
  size_t num_encoded(const kv::PageTable& table) const;  // of the group without a window
  size_t pages_due(int64_t slots) const;
  // Of so many tokens those that a prefix that is cached, or found, has at most.
  int64_t plain_prefix(const PrefixKey& key, int64_t tokens) const;
  // Behind the encoded pages.
  int64_t plain_slots(const kv::Sequence& sequence) const;
  // A sequence without encoded pages; throws Unsupported for others.
  kv::Sequence& find_plain(const char* verb, SequenceId id);
  std::span<const int32_t> due(const kv::Sequence& sequence) const;
  std::vector<int32_t> encoded_beside(std::span<const int32_t> pages) const;
  bool has_room_to_encode(std::span<const int32_t> pages) const;
  void make_room_to_encode(std::span<const int32_t> pages);

  // retain.cpp, rotate.cpp
  size_t checked_group(const char* verb, int32_t group) const;
  // Throws Unsupported where keys have to stay in their slots.
  void require_movable(const char* verb) const;
  bool is_shared(int32_t page, size_t group) const;
  void own_pages(const char* verb, kv::PageTable& table, size_t group, size_t first, size_t end);
  void evict_pages(kv::PageTable& table, size_t group, int64_t begin, int64_t end);
  void rotate(const kv::PageTable& table, size_t group, int64_t first, int64_t delta);
};

}  // namespace effinfer
