#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "effinfer/error.h"
#include "runtime/speculative/grow.h"

namespace effinfer {
namespace {

class RecyclingProposer final : public Proposer {
 public:
  explicit RecyclingProposer(int32_t width) : width_(width) {
    if (width >= 1 && width <= 32) return;
    throw InvalidArgument("[speculation] width: expected 1..32, got " + std::to_string(width));
  }

  std::string_view name() const override { return "recycling"; }
  int32_t top_k() const override { return width_; }
  void attach(int64_t vocab_size) override {
    entries_.assign(static_cast<size_t>(vocab_size * width_), {});
  }

  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    for (size_t i = 0; i < views.size(); ++i) {
      const DraftView& view = views[i];
      grower_.grow(view.tokens.back(), view.max_nodes, view.max_depth, drafts[i],
                   [&](int32_t token, int32_t, const auto& offer) {
                     for (const Entry& entry : successors(token)) {
                       if (entry.score == 0.0f) break;
                       offer(entry.token, entry.score, entry.token);
                     }
                   });
    }
  }

  void observe(std::span<const StepFacts> facts) override {
    for (const StepFacts& fact : facts) {
      const size_t first = fact.tokens.size() - fact.num_emitted - 1;  // the root
      learn(fact.tokens[first], fact.top, 0);
      if (fact.verified == nullptr) continue;
      const std::vector<int32_t>& nodes = fact.verified->tokens;
      for (size_t i = 0; i < nodes.size(); ++i) learn(nodes[i], fact.top, i + 1);
    }
  }

 private:
  struct Entry {
    int32_t token;
    float score;  // 0: none
  };

  std::span<Entry> successors(int32_t token) {
    const auto width = static_cast<size_t>(width_);
    return std::span(entries_).subspan(static_cast<size_t>(token) * width, width);
  }

  // The softmax over the highest logits alone: the controller learns how much less is accepted.
  void learn(int32_t token, const TopLogits& top, size_t row) {
    const auto k = static_cast<size_t>(top.k);
    if (k == 0) return;
    const std::span<const float> values = top.values.subspan(row * k, k);
    if (!std::isfinite(values[0])) return;
    const std::span<Entry> entries = successors(token);
    const size_t count = std::min(k, entries.size());
    float total = 0.0f;
    for (size_t i = 0; i < count; ++i) {
      entries[i] = {top.tokens[row * k + i], std::exp(values[i] - values[0])};
      total += entries[i].score;
    }
    for (Entry& entry : entries.first(count)) entry.score /= total;
    for (Entry& entry : entries.subspan(count)) entry.score = 0.0f;
  }

  int32_t width_;
  std::vector<Entry> entries_;  // [vocab, width], the likeliest first
  runtime::TreeGrower<int32_t> grower_;
};

}  // namespace

std::shared_ptr<Proposer> recycling_proposer(int32_t width) {
  return std::make_shared<RecyclingProposer>(width);
}

}  // namespace effinfer
