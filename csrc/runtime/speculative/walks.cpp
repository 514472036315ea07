#include "runtime/speculative/walks.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace effinfer::runtime {
namespace {

void find_children(const Draft& draft, int32_t parent, std::vector<int32_t>& children) {
  children.clear();
  for (int32_t node = parent + 1; node < draft.size(); ++node) {
    if (draft.parents[static_cast<size_t>(node)] == parent) children.push_back(node);
  }
}

int32_t token_of(const Draft& draft, int32_t node) {
  return draft.tokens[static_cast<size_t>(node)];
}

}  // namespace

void RejectionWalk::run(const Draft& draft, const TargetRows& target, Chance& chance, Path& path) {
  for (int32_t node = -1;;) {
    find_children(draft, node, children_);
    if (children_.empty()) return;
    const std::span<double> row = target(node + 1);
    residual_.start(row, draft, node + 1, children_);
    int32_t next = -1;
    for (const int32_t child : children_) {
      const int32_t token = token_of(draft, child);
      const bool accepted =
          chance.happens(std::min(1.0, residual_.target(token) / residual_.guess(token)));
      // Nothing left: the child's refusal was an error of rounding.
      if (!accepted && residual_.refuse(token, 1.0) > 0.0) continue;
      next = child;
      break;
    }
    if (next < 0) {
      residual_.apply(row);
      path.token = chance.draw(row);
      return;
    }
    path.nodes.push_back(next);
    node = next;
  }
}

void TraversalWalk::run(const Draft& draft, const TargetRows& target, Chance& chance, Path& path) {
  draft_ = &draft;
  target_ = &target;
  chance_ = &chance;
  path_ = &path;
  visit(-1, 0, 1.0);
  std::reverse(path.nodes.begin(), path.nodes.end());
}

// Whether the node or one below it was accepted: paths are then complete from there down. The root
// is worth 1 to the end, so it is accepted when nothing else was.
bool TraversalWalk::visit(int32_t node, size_t depth, double worth) {
  Level& level = levels_[depth];
  find_children(*draft_, node, level.children);
  if (!level.children.empty() && worth > 0.0) {
    level.residual.start((*target_)(node + 1), *draft_, node + 1, level.children);
    for (const int32_t child : level.children) {
      const int32_t token = token_of(*draft_, child);
      const double ratio = level.residual.target(token) / level.residual.guess(token);
      if (visit(child, depth + 1, std::min(1.0, worth * ratio))) {
        if (node >= 0) path_->nodes.push_back(node);
        return true;
      }
      const double left = level.residual.refuse(token, worth);
      const double all = left + 1.0 - worth;
      worth = all > 0.0 ? left / all : worth;
    }
  }
  if (node >= 0 && !chance_->happens(worth)) return false;
  if (node >= 0) path_->nodes.push_back(node);
  if (!level.children.empty()) {
    const std::span<double> row = (*target_)(node + 1);
    level.residual.apply(row);
    path_->token = chance_->draw(row);
  }
  return true;
}

void TypicalWalk::run(const Draft& draft, const TargetRows& target, Path& path) {
  std::array<int8_t, Draft::kMostNodes> depths = {};  // 0: not accepted
  int32_t deepest = -1;
  std::vector<int32_t> children;
  for (int32_t parent = -1; parent < draft.size(); ++parent) {
    const int depth = parent < 0 ? 0 : depths[static_cast<size_t>(parent)];
    if (parent >= 0 && depth == 0) continue;
    find_children(draft, parent, children);
    if (children.empty()) continue;
    const std::span<double> row = target(parent + 1);
    double entropy = 0.0;
    for (const double p : row) entropy -= p > 0.0 ? p * std::log(p) : 0.0;
    const double least = std::min(epsilon_, delta_ * std::exp(-entropy));
    for (const int32_t child : children) {
      if (row[static_cast<size_t>(token_of(draft, child))] <= least) continue;
      depths[static_cast<size_t>(child)] = static_cast<int8_t>(depth + 1);
      if (deepest < 0 || depth + 1 > depths[static_cast<size_t>(deepest)]) deepest = child;
    }
  }
  for (; deepest >= 0; deepest = draft.parents[static_cast<size_t>(deepest)]) {
    path.nodes.push_back(deepest);
  }
  std::reverse(path.nodes.begin(), path.nodes.end());
}

}  // namespace effinfer::runtime
