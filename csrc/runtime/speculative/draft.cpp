#include "runtime/speculative/draft.h"

#include <algorithm>
#include <cmath>

namespace effinfer {

void Draft::clear() {
  tokens.clear();
  parents.clear();
  scores.clear();
  sources.clear();
  draw = Draw::none;
  candidates.clear();
  ranges.clear();
  refusal.clear();
}

std::span<const Draft::Candidate> Draft::candidates_of(int32_t row) const {
  const auto at = static_cast<size_t>(row);
  if (at >= ranges.size()) return {};
  return std::span(candidates)
      .subspan(static_cast<size_t>(ranges[at].first), static_cast<size_t>(ranges[at].count));
}

void Draft::set_candidates(int32_t row, std::span<const Candidate> list) {
  const auto at = static_cast<size_t>(row);
  if (at >= ranges.size()) ranges.resize(at + 1);
  ranges[at] = {static_cast<int32_t>(candidates.size()), static_cast<int32_t>(list.size())};
  candidates.insert(candidates.end(), list.begin(), list.end());
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

namespace {

// The children of a row must be what its candidates can give.
std::string trouble_of_children(const Draft& draft, int32_t row) {
  const std::span<const Draft::Candidate> candidates = draft.candidates_of(row);
  const auto is_possible = [&](int32_t token) {
    return std::any_of(candidates.begin(), candidates.end(), [&](const Draft::Candidate& c) {
      return c.token == token && c.probability > 0.0f;
    });
  };
  for (int32_t i = row; i < draft.size(); ++i) {
    const auto node = static_cast<size_t>(i);
    if (draft.parents[node] != row - 1) continue;
    const int32_t first = draft.child(row - 1, draft.tokens[node]);
    const bool again = draft.draw == Draft::Draw::without_replacement && first != i;
    if (!again && is_possible(draft.tokens[node])) continue;
    return "node " + std::to_string(i) + ": expected a token that its parent's candidates give" +
           (again ? " once" : "") + ", got " + std::to_string(draft.tokens[node]);
  }
  return {};
}

std::string trouble_of_candidates(const Draft& draft, int64_t vocab_size) {
  const auto total = static_cast<int64_t>(draft.candidates.size());
  if (draft.ranges.size() > draft.tokens.size() + 1 || (draft.draw == Draft::Draw::none && total)) {
    return "expected candidates of drawn nodes, of at most " +
           std::to_string(draft.tokens.size() + 1) + " rows";
  }
  for (size_t row = 0; row < draft.ranges.size(); ++row) {
    const Draft::Range& range = draft.ranges[row];
    const auto label = [row] { return "candidates of row " + std::to_string(row) + ": expected "; };
    if (range.first < 0 || range.count < 0 || range.count > Draft::kMostCandidates ||
        int64_t{range.first} + range.count > total) {
      return label() + "at most " + std::to_string(Draft::kMostCandidates) + " of the draft's";
    }
    if (range.count == 0) continue;
    double sum = 0.0;
    for (const Draft::Candidate& c : draft.candidates_of(static_cast<int32_t>(row))) {
      if (c.token < 0 || c.token >= vocab_size || !(c.probability >= 0.0f)) {
        return label() + "token ids and probabilities, got " + std::to_string(c.token) + " and " +
               std::to_string(c.probability);
      }
      sum += static_cast<double>(c.probability);
    }
    if (!(std::abs(sum - 1.0) < 1e-3)) {
      return label() + "a sum of 1, got " + std::to_string(sum);
    }
    const std::string trouble = trouble_of_children(draft, static_cast<int32_t>(row));
    if (!trouble.empty()) return trouble;
  }
  return {};
}

// What a drawn node is worth before it is known what such nodes are: by its place among siblings.
float score_of_rank(int32_t rank) {
  return 0.6f * std::pow(0.35f, static_cast<float>(rank));
}

void copy_candidates(const Draft& from, int32_t row, Draft& to, int32_t to_row) {
  const std::span<const Draft::Candidate> list = from.candidates_of(row);
  if (!list.empty()) to.set_candidates(to_row, list);
}

}  // namespace

std::string trouble_of(const Draft& draft, int32_t max_nodes, const DraftIds& ids) {
  if (!draft.refusal.empty()) return draft.refusal;
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
    const int64_t end = draft.scores[i] == Draft::kProbe ? std::max(ids.vocab, ids.all) : ids.vocab;
    if (draft.tokens[i] < 0 || draft.tokens[i] >= end) {
      return node() + "a token id in 0.." + std::to_string(end - 1) + ", got " +
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
  return trouble_of_candidates(draft, ids.vocab);
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

void take_drawn(const Draft& from, uint8_t source, const DraftView& view, Draft& to) {
  std::array<int32_t, Draft::kMostNodes> places;  // of the nodes in `to`; -1: not there
  std::array<int32_t, Draft::kMostNodes> depths;
  to.draw = from.draw;
  copy_candidates(from, 0, to, 0);
  for (size_t i = 0; i < from.tokens.size(); ++i) {
    const int32_t above = from.parents[i];
    const auto parent = static_cast<size_t>(above);
    depths[i] = above < 0 ? 1 : depths[parent] + 1;
    places[i] = -1;
    if (depths[i] > view.max_depth || (above >= 0 && places[parent] < 0)) continue;
    const auto rank = static_cast<int32_t>(
        std::count(from.parents.begin(), from.parents.begin() + static_cast<ptrdiff_t>(i), above));
    places[i] = to.add(from.tokens[i], above < 0 ? -1 : places[parent], score_of_rank(rank));
    to.sources.push_back(source);
    copy_candidates(from, static_cast<int32_t>(i) + 1, to, places[i] + 1);
  }
}

uint64_t with_earlier_siblings(const Draft& draft, uint64_t keep) {
  if (draft.draw == Draft::Draw::none) return keep;
  std::array<bool, Draft::kMostNodes + 1> cut = {};  // by row: whether a child got no row
  for (int32_t node = 0; node < draft.size(); ++node) {
    const int32_t parent = draft.parents[static_cast<size_t>(node)];
    bool& none = cut[static_cast<size_t>(parent + 1)];
    const bool rooted = parent < 0 || (keep >> parent & 1) != 0;
    none = none || !rooted || (keep >> node & 1) == 0;
    if (none) keep &= ~(uint64_t{1} << node);
  }
  return keep;
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
      copy_candidates(from_, node + 1, to_.draft, index + 1);
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
  if (draft.ranges.size() > nodes + 1) draft.ranges.resize(nodes + 1);
}

bool DraftTree::is_chain() const {
  for (size_t i = 0; i < draft.parents.size(); ++i) {
    if (draft.parents[i] != static_cast<int32_t>(i) - 1) return false;
  }
  return true;
}

void plant(const Draft& draft, uint64_t keep, const TreePlace& place, DraftTree& tree) {
  tree.clear();
  tree.draft.draw = draft.draw;
  copy_candidates(draft, 0, tree.draft, 0);
  Preorder(draft, keep, place, tree).visit(-1, -1, 1);
}

}  // namespace effinfer::runtime

namespace effinfer {

NamedRows StepFacts::output(std::string_view name) const {
  const size_t count = 1 + (verified == nullptr ? size_t{0} : verified->tokens.size());
  for (const OutputRows& output : outputs) {
    if (output.name != name) continue;
    const auto cols = static_cast<size_t>(output.rows.cols);
    return {output.rows.values.subspan(first_row * cols, count * cols), output.rows.cols};
  }
  return {};
}

}  // namespace effinfer
