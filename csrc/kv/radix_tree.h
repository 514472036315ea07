// The prefixes that the KV cache remembers: a tree whose edges are the tokens of one page, so that
// the path from the root to a node spells a prefix of whole pages, and each node holds the page of
// its last 64 tokens (SGLang's RadixAttention, Zheng et al. 2024, section 3, at page granularity).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "kv/page_pool.h"

namespace effinfer::kv {

class RadixTree {
 public:
  explicit RadixTree(PagePool& pool) : pool_(pool) { clear(); }

  // Pages of the longest known prefix of `tokens`, at most `max_pages`; marks them used now.
  std::vector<int32_t> match(std::span<const int32_t> tokens, size_t max_pages);
  // Remembers pages.size() whole pages of `tokens`, with a reference to each page that is new. A
  // prefix that is known already keeps the page that it has.
  void insert(std::span<const int32_t> tokens, std::span<const int32_t> pages);
  // Pages that evict() could free one after the other: no sequence uses them or what follows them.
  int32_t evictable() const;
  // Drops the least recently used leaf that no sequence uses; false when there is none.
  bool evict();
  void clear();

  int32_t size() const { return static_cast<int32_t>(nodes_.size() - free_nodes_.size()) - 1; }
  // Throws InternalError for a broken link; adds the references held to `references`.
  void check(std::span<int32_t> references) const;

 private:
  using Key = std::array<int32_t, ops::kPageSize>;
  using NodeId = int32_t;
  static constexpr NodeId kRoot = 0;
  struct Node {
    NodeId parent = -1;  // -1: the root or an unused slot
    int32_t page = -1;
    uint64_t last_used = 0;
    Key key{};
    std::map<Key, NodeId> children;
  };

  NodeId find(NodeId parent, std::span<const int32_t> tokens, size_t page) const;
  NodeId add(NodeId parent, const Key& key, int32_t page);
  void remove(NodeId id);
  void touch(NodeId id);
  static Key key_of(std::span<const int32_t> tokens, size_t page);

  PagePool& pool_;
  std::vector<Node> nodes_;
  std::vector<NodeId> free_nodes_;
  std::set<std::pair<uint64_t, NodeId>> leaves_;  // by time of last use
  uint64_t clock_ = 0;
};

}  // namespace effinfer::kv
