// The prefixes that the KV cache remembers: a tree whose edges are the tokens of one page, so that
// the path from the root to a node spells a prefix of whole pages, and each node holds the page of
// its last 64 tokens (SGLang's RadixAttention, Zheng et al. 2024, section 3, at page granularity).
//
// Pages that different methods made are of different prefixes. Where a page also depends on what
// follows it, up to the end of its unit, the edge to the first page of a unit is all of its tokens.
//
// A node has a page in each group of layers. In groups with a window it may lack one: who computed
// the prefix had freed it. A prefix is found as far as it ends in a whole window.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "kv/page_pool.h"

namespace effinfer::kv {

// How pages came about.
struct Making {
  uint64_t methods = 0;
  size_t unit = 1;  // pages that depend on each other's tokens
};

class RadixTree {
 public:
  // `pools` and `windows` (window_left, -1: none) by group; the first is without a window.
  RadixTree(std::span<const std::unique_ptr<PagePool>> pools, std::vector<int64_t> windows);

  struct Prefix {
    size_t pages = 0;  // whose keys are there in every group
    size_t known = 0;  // that are there in the first group
    // By group, of the prefix's pages; kFreed where a window does not need them.
    std::vector<std::vector<int32_t>> by_group;
  };
  // Pages of a prefix in one group: pages[i] is the prefix's page `first` + i.
  struct GroupPages {
    std::span<const int32_t> pages;
    size_t first = 0;
  };

  // The longest prefix of `tokens`, at most `max_pages`, in whole units; marks its pages used now.
  Prefix match(std::span<const int32_t> tokens, size_t max_pages, const Making& making);
  // Remembers `count` whole pages of `tokens` (whole units), with a reference to each page that is
  // new. A prefix that is known already keeps the pages that it has.
  void insert(std::span<const int32_t> tokens, size_t count, std::span<const GroupPages> groups,
              const Making& making);
  // Pages of a group that evict() could free one after the other: no sequence uses them or what
  // follows them.
  int32_t evictable(size_t group = 0) const;
  // By id of the first group's pages: whether a prefix has it.
  std::vector<uint8_t> held() const;
  // Drops the least recently used leaf that no sequence uses; false when there is none.
  bool evict();
  void clear();

  int32_t size() const { return static_cast<int32_t>(nodes_.size() - free_nodes_.size()) - 1; }
  // Throws InternalError for a broken link; adds the references held, by group.
  void check(std::span<std::vector<int32_t>> references) const;

 private:
  using Tokens = std::array<int32_t, ops::kPageSize>;
  struct Key {
    uint64_t methods = 0;
    Tokens tokens{};            // of the page
    std::vector<int32_t> rest;  // of its unit, behind the unit's first page
    auto operator<=>(const Key&) const = default;
    bool operator==(const Key&) const = default;
  };
  using NodeId = int32_t;
  static constexpr NodeId kRoot = 0;
  struct Node {
    NodeId parent = -1;  // -1: the root or an unused slot
    int32_t page = -1;
    std::vector<int32_t> others;  // pages of the groups behind the first, or kFreed
    uint64_t last_used = 0;
    Key key{};
    std::map<Key, NodeId> children;
  };

  NodeId find(NodeId parent, std::span<const int32_t> tokens, size_t page,
              const Making& making) const;
  NodeId add(NodeId parent, const Key& key, int32_t page);
  void add_others(Node& node, size_t page, std::span<const GroupPages> groups);
  bool has_window(std::span<const NodeId> path, size_t count) const;
  void release_pages(const Node& node);
  void remove(NodeId id);
  void touch(NodeId id);
  static Key key_of(std::span<const int32_t> tokens, size_t page, const Making& making);
  PagePool& pool(size_t group) const { return *pools_[group]; }

  std::span<const std::unique_ptr<PagePool>> pools_;
  std::vector<int64_t> windows_;
  std::vector<Node> nodes_;
  std::vector<NodeId> free_nodes_;
  std::set<std::pair<uint64_t, NodeId>> leaves_;  // by time of last use
  uint64_t clock_ = 0;
};

}  // namespace effinfer::kv
