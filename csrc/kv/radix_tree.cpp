#include "kv/radix_tree.h"

#include <algorithm>
#include <string>

#include "effinfer/error.h"
#include "kv/sequence.h"

namespace effinfer::kv {

RadixTree::RadixTree(std::span<const std::unique_ptr<PagePool>> pools, std::vector<int64_t> windows)
    : pools_(pools), windows_(std::move(windows)) {
  clear();
}

RadixTree::Key RadixTree::key_of(std::span<const int32_t> tokens, size_t page,
                                 const Making& making) {
  Key key;
  key.methods = making.methods;
  const size_t size = key.tokens.size();
  std::copy_n(tokens.data() + page * size, size, key.tokens.begin());
  if (page % making.unit == 0) {
    const std::span<const int32_t> rest =
        tokens.subspan((page + 1) * size, (making.unit - 1) * size);
    key.rest.assign(rest.begin(), rest.end());
  }
  return key;
}

RadixTree::NodeId RadixTree::find(NodeId parent, std::span<const int32_t> tokens, size_t page,
                                  const Making& making) const {
  const auto& children = nodes_[static_cast<size_t>(parent)].children;
  if (children.empty()) return -1;
  const auto found = children.find(key_of(tokens, page, making));
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

// Whether the first `count` pages of a path end in whole windows.
bool RadixTree::has_window(std::span<const NodeId> path, size_t count) const {
  const auto tokens = static_cast<int64_t>(count) * ops::kPageSize;
  for (size_t group = 1; group < windows_.size(); ++group) {
    if (windows_[group] < 0) continue;  // of these every page is there
    auto page = static_cast<size_t>(first_needed_page(windows_[group], tokens));
    for (; page < count; ++page) {
      const Node& node = nodes_[static_cast<size_t>(path[page])];
      if (node.others[group - 1] == kFreed) return false;
    }
  }
  return true;
}

RadixTree::Prefix RadixTree::match(std::span<const int32_t> tokens, size_t max_pages,
                                   const Making& making) {
  ++clock_;
  std::vector<NodeId> path;
  const size_t whole = std::min(max_pages, tokens.size() / std::tuple_size_v<Tokens>);
  const size_t limit = whole / making.unit * making.unit;
  while (path.size() < limit) {
    const NodeId id = find(path.empty() ? kRoot : path.back(), tokens, path.size(), making);
    if (id < 0) break;
    path.push_back(id);
  }
  Prefix prefix;
  prefix.known = prefix.pages = path.size() / making.unit * making.unit;
  while (!has_window(path, prefix.pages)) prefix.pages -= making.unit;
  for (const NodeId id : path) touch(id);
  prefix.by_group.resize(windows_.size());
  const auto count = static_cast<int64_t>(prefix.pages) * ops::kPageSize;
  for (size_t group = 0; group < windows_.size(); ++group) {
    const int64_t first = windows_[group] < 0 ? 0 : first_needed_page(windows_[group], count);
    for (size_t page = 0; page < prefix.pages; ++page) {
      const Node& node = nodes_[static_cast<size_t>(path[page])];
      const bool needed = static_cast<int64_t>(page) >= first;
      const int32_t id = group == 0 ? node.page : node.others[group - 1];
      prefix.by_group[group].push_back(needed ? id : kFreed);
    }
  }
  return prefix;
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
  node.others.assign(windows_.size() - 1, kFreed);
  leaves_.insert({clock_, id});
  pool(0).retain(page);
  return id;
}

// What the node lacks of a prefix's page.
void RadixTree::add_others(Node& node, size_t page, std::span<const GroupPages> groups) {
  for (size_t i = 0; i < node.others.size(); ++i) {
    const GroupPages& given = groups[i + 1];
    if (node.others[i] != kFreed || page < given.first) continue;
    if (page - given.first >= given.pages.size()) continue;
    node.others[i] = given.pages[page - given.first];
    if (node.others[i] != kFreed) pool(i + 1).retain(node.others[i]);
  }
}

void RadixTree::insert(std::span<const int32_t> tokens, size_t count,
                       std::span<const GroupPages> groups, const Making& making) {
  ++clock_;
  NodeId id = kRoot;
  for (size_t i = 0; i < count; ++i) {
    const NodeId known = find(id, tokens, i, making);
    if (known >= 0) touch(known);
    id = known >= 0 ? known : add(id, key_of(tokens, i, making), groups[0].pages[i]);
    add_others(nodes_[static_cast<size_t>(id)], i, groups);
  }
}

int32_t RadixTree::evictable(size_t group) const {
  std::vector<uint8_t> pinned(nodes_.size(), 0);
  const auto counts = [&](const Node& node) {
    if (group == 0) return true;
    const int32_t page = node.others[group - 1];
    return page != kFreed && pool(group).references(page) == 1;
  };
  int32_t count = 0;
  for (const Node& node : nodes_) count += node.parent >= 0 && counts(node) ? 1 : 0;
  for (const Node& node : nodes_) {
    if (node.parent < 0 || pool(0).references(node.page) == 1) continue;
    // A page in use keeps the whole path to it.
    for (const Node* up = &node; up->parent >= 0; up = &nodes_[static_cast<size_t>(up->parent)]) {
      uint8_t& mark = pinned[static_cast<size_t>(up - nodes_.data())];
      if (mark != 0) break;
      mark = 1;
      count -= counts(*up) ? 1 : 0;
    }
  }
  return count;
}

std::vector<uint8_t> RadixTree::held() const {
  std::vector<uint8_t> held(static_cast<size_t>(pool(0).num_pages()), 0);
  for (const Node& node : nodes_) {
    if (node.parent >= 0) held[static_cast<size_t>(node.page)] = 1;
  }
  return held;
}

void RadixTree::release_pages(const Node& node) {
  pool(0).release(node.page);
  for (size_t i = 0; i < node.others.size(); ++i) {
    if (node.others[i] != kFreed) pool(i + 1).release(node.others[i]);
  }
}

void RadixTree::remove(NodeId id) {
  Node& node = nodes_[static_cast<size_t>(id)];
  const NodeId parent = node.parent;
  Node& up = nodes_[static_cast<size_t>(parent)];
  leaves_.erase({node.last_used, id});
  up.children.erase(node.key);
  if (parent != kRoot && up.children.empty()) leaves_.insert({up.last_used, parent});
  release_pages(node);
  node = Node{};
  free_nodes_.push_back(id);
}

bool RadixTree::evict() {
  for (const auto& [stamp, id] : leaves_) {
    if (pool(0).references(nodes_[static_cast<size_t>(id)].page) > 1) continue;
    remove(id);
    return true;
  }
  return false;
}

void RadixTree::clear() {
  for (const Node& node : nodes_) {
    if (node.parent >= 0) release_pages(node);
  }
  nodes_.assign(1, Node{});
  free_nodes_.clear();
  leaves_.clear();
}

void RadixTree::check(std::span<std::vector<int32_t>> references) const {
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
    ++references[0][static_cast<size_t>(node.page)];
    for (size_t group = 1; group <= node.others.size(); ++group) {
      const int32_t page = node.others[group - 1];
      if (page != kFreed) ++references[group][static_cast<size_t>(page)];
    }
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
