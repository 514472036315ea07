#include "kv/radix_tree.h"

#include <algorithm>
#include <string>

#include "effinfer/error.h"

namespace effinfer::kv {

RadixTree::Key RadixTree::key_of(std::span<const int32_t> tokens, size_t page) {
  Key key;
  std::copy_n(tokens.data() + page * key.size(), key.size(), key.begin());
  return key;
}

RadixTree::NodeId RadixTree::find(NodeId parent, std::span<const int32_t> tokens,
                                  size_t page) const {
  const auto& children = nodes_[static_cast<size_t>(parent)].children;
  if (children.empty()) return -1;
  const auto found = children.find(key_of(tokens, page));
  return found == children.end() ? -1 : found->second;
}

void RadixTree::touch(NodeId id) {
  Node& node = nodes_[static_cast<size_t>(id)];
  if (node.children.empty()) {
    leaves_.erase({node.last_used, id});
    leaves_.insert({clock_, id});
  }
  node.last_used = clock_;
}

std::vector<int32_t> RadixTree::match(std::span<const int32_t> tokens, size_t max_pages) {
  ++clock_;
  std::vector<int32_t> pages;
  NodeId id = kRoot;
  const size_t limit = std::min(max_pages, tokens.size() / std::tuple_size_v<Key>);
  while (pages.size() < limit) {
    id = find(id, tokens, pages.size());
    if (id < 0) break;
    touch(id);
    pages.push_back(nodes_[static_cast<size_t>(id)].page);
  }
  return pages;
}

RadixTree::NodeId RadixTree::add(NodeId parent, const Key& key, int32_t page) {
  NodeId id = 0;
  if (free_nodes_.empty()) {
    id = static_cast<NodeId>(nodes_.size());
    nodes_.emplace_back();
  } else {
    id = free_nodes_.back();
    free_nodes_.pop_back();
  }
  Node& up = nodes_[static_cast<size_t>(parent)];
  if (up.children.empty()) leaves_.erase({up.last_used, parent});
  up.children.emplace(key, id);
  Node& node = nodes_[static_cast<size_t>(id)];
  node.parent = parent;
  node.page = page;
  node.key = key;
  node.last_used = clock_;
  leaves_.insert({clock_, id});
  pool_.retain(page);
  return id;
}

void RadixTree::insert(std::span<const int32_t> tokens, std::span<const int32_t> pages) {
  ++clock_;
  NodeId id = kRoot;
  for (size_t i = 0; i < pages.size(); ++i) {
    const NodeId known = find(id, tokens, i);
    if (known >= 0) touch(known);
    id = known >= 0 ? known : add(id, key_of(tokens, i), pages[i]);
  }
}

int32_t RadixTree::evictable() const {
  std::vector<uint8_t> pinned(nodes_.size(), 0);
  int32_t count = size();
  for (const Node& node : nodes_) {
    if (node.parent < 0 || pool_.references(node.page) == 1) continue;
    // A page in use keeps the whole path to it.
    for (const Node* up = &node; up->parent >= 0; up = &nodes_[static_cast<size_t>(up->parent)]) {
      uint8_t& mark = pinned[static_cast<size_t>(up - nodes_.data())];
      if (mark != 0) break;
      mark = 1;
      --count;
    }
  }
  return count;
}

void RadixTree::remove(NodeId id) {
  Node& node = nodes_[static_cast<size_t>(id)];
  const NodeId parent = node.parent;
  Node& up = nodes_[static_cast<size_t>(parent)];
  leaves_.erase({node.last_used, id});
  up.children.erase(node.key);
  if (parent != kRoot && up.children.empty()) leaves_.insert({up.last_used, parent});
  pool_.release(node.page);
  node = Node{};
  free_nodes_.push_back(id);
}

bool RadixTree::evict() {
  for (const auto& [stamp, id] : leaves_) {
    if (pool_.references(nodes_[static_cast<size_t>(id)].page) > 1) continue;
    remove(id);
    return true;
  }
  return false;
}

void RadixTree::clear() {
  for (const Node& node : nodes_) {
    if (node.parent >= 0) pool_.release(node.page);
  }
  nodes_.assign(1, Node{});
  free_nodes_.clear();
  leaves_.clear();
}

void RadixTree::check(std::span<int32_t> references) const {
  size_t reachable = 0;
  size_t num_leaves = 0;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const NodeId id = static_cast<NodeId>(i);
    const Node& node = nodes_[i];
    if (id != kRoot && node.parent < 0) continue;
    for (const auto& [key, child] : node.children) {
      const Node& below = nodes_[static_cast<size_t>(child)];
      const bool in_order = id == kRoot || below.last_used <= node.last_used;
      if (below.parent != id || below.key != key || !in_order) {
        throw InternalError("[kv_cache] node " + std::to_string(child) + ": broken link");
      }
      ++reachable;
    }
    if (id == kRoot) continue;
    ++references[static_cast<size_t>(node.page)];
    if (!node.children.empty()) continue;
    ++num_leaves;
    if (!leaves_.contains({node.last_used, id})) {
      throw InternalError("[kv_cache] leaf " + std::to_string(id) + " cannot be evicted");
    }
  }
  if (reachable != static_cast<size_t>(size()) || num_leaves != leaves_.size()) {
    throw InternalError("[kv_cache] the radix tree has unreachable nodes");
  }
}

}  // namespace effinfer::kv
