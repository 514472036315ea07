// Growing a tree of drafts best first: the node that is likeliest to be reached gets its children
// next. With a path's probability as the order this is the tree of that size with the most expected
// tokens (Wang et al. 2024, OPT-Tree, arXiv:2406.17276, section 3).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "effinfer/speculative.h"

namespace effinfer::runtime {

// State is what a proposer needs to know of a node to find its children.
template <class State>
class TreeGrower {
 public:
  TreeGrower() { frontier_.reserve(size_t{4} * Draft::kMostNodes); }

  // expand(state, depth, offer) calls offer(token, score, state) for each child of a node.
  template <class Expand>
  void grow(const State& root, int32_t max_nodes, int32_t max_depth, Draft& draft,
            const Expand& expand) {
    frontier_.clear();
    const auto below = [&](const State& state, int32_t parent, int32_t depth, float path) {
      if (depth >= max_depth) return;
      expand(state, depth, [&](int32_t token, float score, const State& child) {
        if (path * score < kLeastPath) return;
        frontier_.push_back({path * score, score, token, parent, depth + 1, child});
        std::push_heap(frontier_.begin(), frontier_.end(), less);
      });
    };
    below(root, -1, 0, 1.0f);
    while (!frontier_.empty() && draft.size() < max_nodes) {
      std::pop_heap(frontier_.begin(), frontier_.end(), less);
      const Candidate best = frontier_.back();
      frontier_.pop_back();
      const int32_t node = draft.add(best.token, best.parent, best.score);
      below(best.state, node, best.depth, best.path);
    }
  }

 private:
  // Nobody pays a row for less.
  static constexpr float kLeastPath = 0.01f;

  struct Candidate {
    float path;
    float score;
    int32_t token;
    int32_t parent;
    int32_t depth;
    State state;
  };
  static bool less(const Candidate& a, const Candidate& b) {
    return a.path != b.path ? a.path < b.path : a.parent > b.parent;
  }

  std::vector<Candidate> frontier_;
};

}  // namespace effinfer::runtime
