// Trees of what tokens led to before.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "effinfer/error.h"
#include "runtime/speculative/grow.h"

namespace effinfer {
namespace {

constexpr int32_t kMostWidth = 32;

// Rows of followers, the likeliest first.
class Followers {
 public:
  struct Entry {
    int32_t token;
    float score;  // 0: none
  };

  Followers(size_t rows, int32_t width)
      : width_(static_cast<size_t>(width)), entries_(rows * width_) {}

  size_t count() const { return entries_.size() / width_; }
  std::span<Entry> row(size_t index) { return std::span(entries_).subspan(index * width_, width_); }

  // The softmax over the highest logits alone: the controller learns how much less is accepted. Of
  // what the row held a share of `memory` stays.
  static void learn(std::span<const float> values, std::span<const int32_t> tokens, float memory,
                    std::span<Entry> row) {
    std::array<Entry, 2 * kMostWidth> merged;
    size_t count = std::min(values.size(), row.size());
    float total = 0.0f;
    for (size_t i = 0; i < count; ++i) {
      merged[i] = {tokens[i], std::exp(values[i] - values[0])};
      total += merged[i].score;
    }
    const bool is_new = row[0].score == 0.0f;
    const float share = is_new ? 1.0f : 1.0f - memory;
    for (size_t i = 0; i < count; ++i) merged[i].score *= share / total;
    if (!is_new && memory > 0.0f) add_old(row, memory, merged, count);
    count = std::min(count, row.size());
    std::copy_n(merged.begin(), count, row.begin());
    for (Entry& entry : row.subspan(count)) entry.score = 0.0f;
  }

 private:
  static void add_old(std::span<const Entry> row, float memory,
                      std::array<Entry, 2 * kMostWidth>& merged, size_t& count) {
    const size_t fresh = count;
    for (const Entry& old : row) {
      const auto end = merged.begin() + static_cast<ptrdiff_t>(fresh);
      const auto same =
          std::find_if(merged.begin(), end, [&](const Entry& e) { return e.token == old.token; });
      if (same != end) {
        same->score += memory * old.score;
      } else if (old.score > 0.0f) {
        merged[count++] = {old.token, memory * old.score};
      }
    }
    std::sort(merged.begin(), merged.begin() + static_cast<ptrdiff_t>(count),
              [](const Entry& a, const Entry& b) {
                return a.score != b.score ? a.score > b.score : a.token < b.token;
              });
  }

  size_t width_;
  std::vector<Entry> entries_;
};

class RecyclingProposer final : public Proposer {
 public:
  explicit RecyclingProposer(const RecyclingOptions& options) : options_(options) {
    const auto check = [](bool right, const char* expected, const std::string& got) {
      if (!right) {
        throw InvalidArgument(std::string("[speculation] ") + expected + ", got " + got);
      }
    };
    check(options.width >= 1 && options.width <= kMostWidth, "width: expected 1..32",
          std::to_string(options.width));
    check(options.pairs >= 0 && options.pairs <= 1 << 24, "pairs: expected 0..16777216",
          std::to_string(options.pairs));
    check(options.memory >= 0.0f && options.memory < 1.0f, "memory: expected a share below 1",
          std::to_string(options.memory));
  }

  std::string_view name() const override { return "recycling"; }
  int32_t top_k() const override { return options_.width; }

  void attach(int64_t vocab_size) override {
    tokens_ = Followers(static_cast<size_t>(vocab_size), options_.width);
    if (options_.pairs == 0) return;
    const auto pairs = std::bit_ceil(static_cast<size_t>(options_.pairs));
    pairs_ = Followers(pairs, options_.width);
    pair_of_row_.assign(pairs, 0);
  }

  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    for (size_t i = 0; i < views.size(); ++i) {
      const DraftView& view = views[i];
      const size_t size = view.tokens.size();
      const Last root = {size > 1 ? view.tokens[size - 2] : -1, view.tokens[size - 1]};
      grower_.grow(root, view.max_nodes, view.max_depth, drafts[i],
                   [&](const Last& last, int32_t, const auto& offer) {
                     for (const Followers::Entry& entry : followers(last)) {
                       if (entry.score == 0.0f) break;
                       offer(entry.token, entry.score, Last{last.token, entry.token});
                     }
                   });
    }
  }

  void observe(std::span<const StepFacts> facts) override {
    for (const StepFacts& fact : facts) {
      if (fact.top.k == 0) continue;
      const size_t root = fact.tokens.size() - fact.num_emitted - 1;
      learn({root > 0 ? fact.tokens[root - 1] : -1, fact.tokens[root]}, fact.top, 0);
      if (fact.verified == nullptr) continue;
      const Draft& draft = *fact.verified;
      for (size_t i = 0; i < draft.tokens.size(); ++i) {
        const int32_t parent = draft.parents[i];
        const int32_t before =
            parent < 0 ? fact.tokens[root] : draft.tokens[static_cast<size_t>(parent)];
        learn({before, draft.tokens[i]}, fact.top, i + 1);
      }
    }
  }

 private:
  // The last two tokens of a path; -1: there is none.
  struct Last {
    int32_t before;
    int32_t token;
    uint64_t pair() const {
      return uint64_t{static_cast<uint32_t>(before) + 1} << 32 | static_cast<uint32_t>(token);
    }
  };

  size_t pair_row(const Last& last) const {
    return (last.pair() * 0x9E3779B97F4A7C15 >> 32) & (pair_of_row_.size() - 1);
  }

  std::span<const Followers::Entry> followers(const Last& last) {
    if (!pair_of_row_.empty()) {
      const size_t row = pair_row(last);
      if (pair_of_row_[row] == last.pair()) return pairs_.row(row);
    }
    return tokens_.row(static_cast<size_t>(last.token));
  }

  void learn(const Last& last, const TopLogits& top, size_t row) {
    const auto k = static_cast<size_t>(top.k);
    const std::span<const float> values = top.values.subspan(row * k, k);
    const std::span<const int32_t> tokens = top.tokens.subspan(row * k, k);
    const bool is_token = static_cast<size_t>(last.token) < tokens_.count();
    if (!std::isfinite(values[0]) || !is_token) return;  // another's probes may have other ids
    Followers::learn(values, tokens, options_.memory, tokens_.row(static_cast<size_t>(last.token)));
    if (pair_of_row_.empty()) return;
    const size_t pair = pair_row(last);
    const bool known = pair_of_row_[pair] == last.pair();
    pair_of_row_[pair] = last.pair();
    Followers::learn(values, tokens, known ? options_.memory : 0.0f, pairs_.row(pair));
  }

  RecyclingOptions options_;
  Followers tokens_{0, 1};
  Followers pairs_{0, 1};
  std::vector<uint64_t> pair_of_row_;  // whose followers a row of `pairs_` holds
  runtime::TreeGrower<Last> grower_;
};

}  // namespace

std::shared_ptr<Proposer> recycling_proposer(const RecyclingOptions& options) {
  return std::make_shared<RecyclingProposer>(options);
}

}  // namespace effinfer
