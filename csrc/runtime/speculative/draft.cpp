#include "runtime/speculative/draft.h"

#include <cmath>

namespace effinfer {

void Draft::clear() {
  tokens.clear();
  parents.clear();
  scores.clear();
  sources.clear();
}

int32_t Draft::add(int32_t token, int32_t parent, float score) {
  tokens.push_back(token);
  parents.push_back(parent);
  scores.push_back(score);
  return size() - 1;
}

int32_t Draft::child(int32_t parent, int32_t token) const {
  if (parent < -1 || parent >= size()) return -1;
  for (int32_t i = parent + 1; i < size(); ++i) {
    const auto node = static_cast<size_t>(i);
    if (parents[node] == parent && tokens[node] == token) return i;
  }
  return -1;
}

}  // namespace effinfer

namespace effinfer::runtime {

void reserve(Draft& draft) {
  draft.tokens.reserve(Draft::kMostNodes);
  draft.parents.reserve(Draft::kMostNodes);
  draft.scores.reserve(Draft::kMostNodes);
  draft.sources.reserve(Draft::kMostNodes);
}

std::string trouble_of(const Draft& draft, int32_t max_nodes, int64_t vocab_size) {
  const size_t size = draft.tokens.size();
  if (draft.parents.size() != size || draft.scores.size() != size) {
    return "expected as many parents and scores as tokens, got " + std::to_string(size) +
           " tokens, " + std::to_string(draft.parents.size()) + " parents, " +
           std::to_string(draft.scores.size()) + " scores";
  }
  if (size > static_cast<size_t>(max_nodes)) {
    return "expected at most " + std::to_string(max_nodes) + " nodes, got " + std::to_string(size);
  }
  for (size_t i = 0; i < size; ++i) {
    const auto node = [i] { return "node " + std::to_string(i) + ": expected "; };
    if (draft.tokens[i] < 0 || draft.tokens[i] >= vocab_size) {
      return node() + "a token id in 0.." + std::to_string(vocab_size - 1) + ", got " +
             std::to_string(draft.tokens[i]);
    }
    if (draft.parents[i] < -1 || draft.parents[i] >= static_cast<int32_t>(i)) {
      return node() + "an earlier node as parent, or -1, got " + std::to_string(draft.parents[i]);
    }
    const float score = draft.scores[i];
    if (!(score >= 0.0f && score <= 1.0f) && score != Draft::kProbe) {
      return node() + "a score in [0, 1], got " + std::to_string(score);
    }
  }
  return {};
}

void merge(const Draft& from, uint8_t source, const DraftView& view, Draft& to) {
  std::array<int32_t, Draft::kMostNodes> places;  // of the nodes in `to`; kNowhere: not there
  std::array<int32_t, Draft::kMostNodes> depths;
  constexpr int32_t kNowhere = -2;
  for (size_t i = 0; i < from.tokens.size(); ++i) {
    const int32_t above = from.parents[i];
    const int32_t parent = above < 0 ? -1 : places[static_cast<size_t>(above)];
    depths[i] = above < 0 ? 1 : depths[static_cast<size_t>(above)] + 1;
    places[i] = kNowhere;
    if (parent == kNowhere || depths[i] > view.max_depth) continue;
    const int32_t known = to.child(parent, from.tokens[i]);
    if (known >= 0) {
      places[i] = known;
      continue;
    }
    if (to.size() >= view.max_nodes) continue;
    places[i] = to.add(from.tokens[i], parent, from.scores[i]);
    to.sources.push_back(source);
  }
}

namespace {

// Appends the kept nodes below `parent` (of `from`) in preorder, the likeliest sibling first.
class Preorder {
 public:
  Preorder(const Draft& from, uint64_t keep, const TreePlace& place, DraftTree& to)
      : from_(from), left_(keep), place_(place), to_(to) {}

  void visit(int32_t parent, int32_t at, int32_t depth) {
    for (int32_t node = best(parent); node >= 0; node = best(parent)) {
      left_ &= ~bit(node);
      const int32_t index = to_.draft.size();
      // Its place in the cache against that of its depth.
      if (page(place_.root + 1 + index) != page(place_.root + depth)) continue;
      const auto i = static_cast<size_t>(node);
      to_.draft.add(from_.tokens[i], at, from_.scores[i]);
      to_.draft.sources.push_back(from_.sources[i]);
      const uint64_t above = to_.words[static_cast<size_t>(at) + 1];
      to_.words.push_back(above | bit(index + 1));
      to_.depths.push_back(depth);
      visit(node, index, depth + 1);
    }
  }

 private:
  static uint64_t bit(int32_t node) { return uint64_t{1} << node; }
  int64_t page(int64_t slot) const { return slot / place_.page_size; }

  int32_t best(int32_t parent) const {
    int32_t found = -1;
    for (uint64_t left = left_; left != 0; left &= left - 1) {
      const auto node = static_cast<int32_t>(std::countr_zero(left));
      if (from_.parents[static_cast<size_t>(node)] != parent) continue;
      if (found < 0 ||
          from_.scores[static_cast<size_t>(node)] > from_.scores[static_cast<size_t>(found)]) {
        found = node;
      }
    }
    return found;
  }

  const Draft& from_;
  uint64_t left_;
  const TreePlace& place_;
  DraftTree& to_;
};

}  // namespace

void DraftTree::reserve() {
  runtime::reserve(draft);
  words.reserve(Draft::kMostNodes + 1);
  depths.reserve(Draft::kMostNodes + 1);
}

void DraftTree::clear() {
  draft.clear();
  words.assign(1, 1);
  depths.assign(1, 0);
}

void DraftTree::cut(size_t nodes) {
  if (draft.tokens.size() <= nodes) return;
  draft.tokens.resize(nodes);
  draft.parents.resize(nodes);
  draft.scores.resize(nodes);
  draft.sources.resize(nodes);
  words.resize(nodes + 1);
  depths.resize(nodes + 1);
}

bool DraftTree::is_chain() const {
  for (size_t i = 0; i < draft.parents.size(); ++i) {
    if (draft.parents[i] != static_cast<int32_t>(i) - 1) return false;
  }
  return true;
}

void plant(const Draft& draft, uint64_t keep, const TreePlace& place, DraftTree& tree) {
  tree.clear();
  Preorder(draft, keep, place, tree).visit(-1, -1, 1);
}

}  // namespace effinfer::runtime
