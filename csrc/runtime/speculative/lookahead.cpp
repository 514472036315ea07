// Lookahead decoding: guesses of tokens further ahead are refined in every step, as Jacobi
// iteration would, and the n-grams that they pass through are what is drafted.
//
// The window has `width` columns. Column i holds a trajectory of N - 1 tokens from position i after
// the last token on, each from one more iteration than the one before; the first tokens of all
// columns follow each other. So the rows form a tree:
//
//   root -> first[1] -> first[2] -> ...          first[0] is the root
//    |        |           |
//   second[0] second[1]  second[2]               (for N = 3; one level more for each above)
//
// and what the last row of a column says ends an n-gram that goes into the pool.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <unordered_map>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/speculative.h"

namespace effinfer {
namespace {

// N-grams by their first token: the latest few of each.
class Pool {
 public:
  static constexpr size_t kEach = 4;

  explicit Pool(size_t length) : length_(length), grams_(kKeys * kEach * length), used_(kKeys) {}

  // `rest`: the tokens behind the first.
  void add(int32_t first, std::span<const int32_t> rest) {
    const size_t key = key_of(first);
    for (size_t i = 0; i < std::min(used_[key], kEach); ++i) {
      const std::span<int32_t> known = gram(key, i);
      if (known[0] == first && std::equal(rest.begin(), rest.end(), known.begin() + 1)) return;
    }
    const std::span<int32_t> place = gram(key, used_[key]++ % kEach);
    place[0] = first;
    std::copy(rest.begin(), rest.end(), place.begin() + 1);
  }

  // Calls use(rest) for the n-grams that begin with a token, the latest first.
  template <class Use>
  void find(int32_t first, const Use& use) {
    const size_t key = key_of(first);
    const size_t count = used_[key];
    for (size_t i = 0; i < std::min(count, kEach); ++i) {
      const std::span<const int32_t> known = gram(key, (count - 1 - i) % kEach);
      if (known[0] == first) use(known.subspan(1));
    }
  }

 private:
  static constexpr size_t kKeys = 1024;
  static size_t key_of(int32_t token) {
    return (static_cast<uint32_t>(token) * 0x9E3779B1u >> 16) % kKeys;
  }
  std::span<int32_t> gram(size_t key, size_t index) {
    return std::span(grams_).subspan((key * kEach + index) * length_, length_);
  }

  size_t length_;
  std::vector<int32_t> grams_;
  std::vector<size_t> used_;  // n-grams that a key was given
};

class LookaheadProposer final : public Proposer {
 public:
  LookaheadProposer(int32_t width, int32_t length) : width_(width), levels_(length - 1) {
    const int32_t probes = width - 1 + width * (levels_ - 1);
    if (width >= 1 && length >= 2 && length <= kMostLevels + 1 && probes <= Draft::kMostNodes)
      return;
    throw InvalidArgument("[speculation] lookahead: expected a width of 1 or more and n-grams of " +
                          std::string("2..8 tokens with at most 63 rows together, got ") +
                          std::to_string(width) + " and " + std::to_string(length));
  }

  std::string_view name() const override { return "lookahead"; }
  int32_t top_k() const override { return 1; }

  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    for (size_t i = 0; i < views.size(); ++i) {
      State& state = state_of(views[i]);
      draft_grams(views[i], state, drafts[i]);
      draft_window(views[i], state, drafts[i]);
    }
  }

  void observe(std::span<const StepFacts> facts) override {
    for (const StepFacts& fact : facts) {
      const auto found = states_.find(fact.request);
      if (found == states_.end() || fact.verified == nullptr || fact.top.k == 0) continue;
      refine(found->second, fact);
    }
  }

  void forget(RequestId request) override { states_.erase(request); }

 private:
  static constexpr float kGramScore = 0.5f;

  struct State {
    std::vector<int32_t> window;  // [levels][width]; the first column's first token is the root
    Pool pool;
  };

  int32_t& at(State& state, int32_t level, int32_t column) const {
    return state.window[static_cast<size_t>(level * width_ + column)];
  }

  // A window begins with tokens of the text, as good a guess as any.
  State& state_of(const DraftView& view) {
    const auto found = states_.find(view.request);
    if (found != states_.end()) return found->second;
    State state = {{}, Pool(static_cast<size_t>(levels_) + 1)};
    const size_t size = view.tokens.size();
    for (int32_t i = 0; i < levels_ * width_; ++i) {
      state.window.push_back(view.tokens[static_cast<size_t>(i) * 7 % size]);
    }
    return states_.emplace(view.request, std::move(state)).first->second;
  }

  void draft_grams(const DraftView& view, State& state, Draft& draft) const {
    state.pool.find(view.tokens.back(), [&](std::span<const int32_t> rest) {
      int32_t parent = -1;
      for (const int32_t token : rest) {
        const int32_t known = draft.child(parent, token);
        if (known < 0 && draft.size() == view.max_nodes) return;
        parent = known >= 0 ? known : draft.add(token, parent, kGramScore);
      }
    });
  }

  // The rows that refine the window: all of them, or none.
  void draft_window(const DraftView& view, State& state, Draft& draft) const {
    const int32_t rows = width_ - 1 + width_ * (levels_ - 1);
    if (draft.size() + rows > view.max_nodes || view.max_depth < width_ + levels_) return;
    int32_t head = -1;
    for (int32_t column = 0; column < width_; ++column) {
      if (column > 0) head = probe(draft, at(state, 0, column), head);
      int32_t node = head;
      for (int32_t level = 1; level < levels_; ++level) {
        node = probe(draft, at(state, level, column), node);
      }
    }
  }

  static int32_t probe(Draft& draft, int32_t token, int32_t parent) {
    const int32_t known = draft.child(parent, token);
    return known >= 0 ? known : draft.add(token, parent, Draft::kProbe);
  }

  // Every column with a row for all of its tokens goes one iteration on: its n-gram into the pool,
  // what its last row says into the window.
  void refine(State& state, const StepFacts& fact) const {
    const Draft& draft = *fact.verified;
    const int32_t root = fact.tokens[fact.tokens.size() - fact.num_emitted - 1];
    std::array<int32_t, kMostLevels> rest = {};
    int32_t head = -1;
    for (int32_t column = 0; column < width_; ++column) {
      if (column > 0) head = draft.child(head, at(state, 0, column));
      if (column > 0 && head < 0) return;
      int32_t node = head;
      size_t known = 0;
      for (int32_t level = 1; level < levels_; ++level) {
        rest[known] = at(state, level, column);
        node = draft.child(node, rest[known]);
        if (node < 0) break;
        ++known;
      }
      if (known + 1 < static_cast<size_t>(levels_)) continue;
      const auto best = static_cast<size_t>((node + 1) * fact.top.k);
      if (!std::isfinite(fact.top.values[best])) continue;
      rest[known] = fact.top.tokens[best];
      state.pool.add(column == 0 ? root : at(state, 0, column),
                     std::span(rest).first(static_cast<size_t>(levels_)));
      for (int32_t level = 0; level + 1 < levels_; ++level) {
        at(state, level, column) = at(state, level + 1, column);
      }
      at(state, levels_ - 1, column) = rest[known];
    }
  }

  static constexpr int32_t kMostLevels = 7;

  int32_t width_;
  int32_t levels_;
  std::unordered_map<RequestId, State> states_;
};

}  // namespace

std::shared_ptr<Proposer> lookahead_proposer(int32_t width, int32_t length) {
  return std::make_shared<LookaheadProposer>(width, length);
}

}  // namespace effinfer
