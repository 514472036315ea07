// Which drafts get a row.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <unordered_map>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/speculative.h"
#include "runtime/speculative/calibration.h"
#include "runtime/speculative/step_times.h"

namespace effinfer {
namespace {

void check_nodes(const char* what, int32_t count) {
  if (count >= 1 && count <= Draft::kMostNodes) return;
  throw InvalidArgument(std::string("[speculation] ") + what + ": expected 1.." +
                        std::to_string(Draft::kMostNodes) + ", got " + std::to_string(count));
}

class FixedController final : public DraftController {
 public:
  explicit FixedController(int32_t count) : count_(count) { check_nodes("count", count); }
  std::string_view name() const override { return "fixed"; }
  int32_t budget(const DraftView&) override { return count_; }
  void choose(std::span<const DraftView>, std::span<const Draft> drafts, const StepBudget& budget,
              std::span<uint64_t> keep) override {
    int32_t left = budget.draft_rows;
    for (size_t i = 0; i < drafts.size(); ++i) {
      const int32_t count = std::min({count_, drafts[i].size(), left});
      keep[i] = (uint64_t{1} << count) - 1;
      left -= count;
    }
  }
  void observe(const StepCost&, std::span<const StepFacts>) override {}

 private:
  int32_t count_;
};

// Of all nodes the likeliest first: adding them in that order, the number with the most expected
// tokens a second. The trees of DySpec (arXiv:2410.11744) and EAGLE-2 (arXiv:2406.16858) and the
// goodput of SmartSpec (arXiv:2406.14066) are this rule; no draft is its least case.
class CostController final : public DraftController {
 public:
  explicit CostController(int32_t most_nodes) : most_nodes_(most_nodes) {
    check_nodes("most_nodes", most_nodes);
    order_.reserve(size_t{64} * Draft::kMostNodes);
    best_paths_.reserve(64);
  }

  std::string_view name() const override { return "cost"; }

  int32_t budget(const DraftView& view) override {
    int32_t& unused = unused_[view.request];
    if (unused < kPatience) return most_nodes_;
    const int32_t rare = unused < 16 * kPatience ? kRare : 2 * kRare;
    return ++unused % rare == 0 ? most_nodes_ : 0;
  }

  void choose(std::span<const DraftView> views, std::span<const Draft> drafts,
              const StepBudget& budget, std::span<uint64_t> keep) override {
    explores_ = false;
    order_.clear();
    best_paths_.clear();
    for (size_t i = 0; i < drafts.size(); ++i) {
      best_paths_.push_back(rank(views[i], drafts[i], static_cast<int32_t>(i)));
    }
    std::sort(order_.begin(), order_.end());
    const size_t count = plain_is_due(budget) ? 0 : best_count(budget);
    for (size_t n = 0; n < count; ++n) {
      keep[static_cast<size_t>(order_[n].draft)] |= uint64_t{1} << order_[n].node;
    }
    const double needed = least_path(budget);
    for (size_t i = 0; i < drafts.size(); ++i) {
      int32_t& unused = unused_[views[i].request];
      const bool hopeless = static_cast<double>(best_paths_[i]) < needed / 2;
      if (keep[i] != 0) {
        unused = 0;
      } else {
        unused += hopeless && unused + kHopeless <= kPatience ? kHopeless : 1;
      }
    }
  }

  void observe(const StepCost& cost, std::span<const StepFacts> facts) override {
    for (const StepFacts& fact : facts) calibration_.observe(fact);
    if (!cost.decoding) return;
    elapsed_ += cost.seconds + cost.propose_seconds;
    if (explores_ && cost.draft_rows > 0) {
      size_t tokens = 0;
      for (const StepFacts& fact : facts) tokens += fact.num_emitted;
      const double plain = times_.of(cost.rows - cost.draft_rows, cost.kv_tokens);
      const double worth = plain * static_cast<double>(tokens) /
                           static_cast<double>(std::max<size_t>(facts.size(), 1));
      lost_ += std::max(0.0, cost.seconds - worth);
    }
    explores_ = false;
    since_plain_ = cost.draft_rows == 0 ? 0 : since_plain_ + 1;
    times_.add(cost.rows, cost.kv_tokens, cost.seconds);
  }

  void forget(RequestId request) override {
    calibration_.forget(request);
    unused_.erase(request);
  }

 private:
  // Steps without a row for a request's drafts, after which they are asked for every kRare-th step,
  // and later every second of those.
  static constexpr int32_t kPatience = 24;
  static constexpr int32_t kRare = 8;
  // Steps that one counts for in which the best node was not worth half a row.
  static constexpr int32_t kHopeless = 3;
  static constexpr int32_t kFresh = 128;      // steps that a plain step's time is believed
  static constexpr double kMostLoss = 0.005;  // of the time, to learn what rows cost
  static constexpr int32_t kMeasured = 3;     // steps that make a measurement
  static constexpr double kLeastGain = 1.02;  // less is noise

  struct Node {
    float path;  // probability that it is accepted
    int32_t draft;
    int32_t node;
    // Parents first, since a path never gets likelier.
    bool operator<(const Node& other) const {
      if (path != other.path) return path > other.path;
      return draft != other.draft ? draft < other.draft : node < other.node;
    }
  };

  // Returns the probability of the likeliest node.
  float rank(const DraftView& view, const Draft& draft, int32_t index) {
    float best = 0.0f;
    std::array<float, Draft::kMostNodes> paths;
    std::array<int32_t, Draft::kMostNodes> depths;
    for (int32_t i = 0; i < draft.size(); ++i) {
      const auto node = static_cast<size_t>(i);
      const int32_t parent = draft.parents[node];
      const auto above = static_cast<size_t>(parent);
      depths[node] = parent < 0 ? 1 : depths[above] + 1;
      const float before = parent < 0 ? 1.0f : paths[above];
      paths[node] = before * calibration_.probability(view.request, draft.sources[node],
                                                      draft.scores[node], depths[node]);
      order_.push_back({paths[node], index, i});
      best = std::max(best, paths[node]);
    }
    return best;
  }

  // What the step's first node must have for its row to pay.
  double least_path(const StepBudget& budget) const {
    const double plain = times_.of(budget.plain_rows, budget.kv_tokens);
    if (plain == 0.0) return 0.0;
    return budget.requests * (times_.of(rows_with(budget, 1), budget.kv_tokens) / plain - 1.0);
  }

  bool plain_is_due(const StepBudget& budget) const {
    return times_.count(budget.plain_rows, budget.kv_tokens) == 0 || since_plain_ >= kFresh;
  }

  // How many of the ranked nodes.
  size_t best_count(const StepBudget& budget) {
    // Beyond what is measured, as beside a long prompt, nobody knows what a row costs.
    const int32_t room =
        std::min(budget.draft_rows, runtime::StepTimes::kMostRows - budget.plain_rows);
    const auto most = std::min(order_.size(), static_cast<size_t>(std::max(room, 0)));
    double expected = budget.requests;
    double best_rate = expected / times_.of(budget.plain_rows, budget.kv_tokens) * kLeastGain;
    size_t best = 0;
    for (size_t n = 1; n <= most; ++n) {
      expected += static_cast<double>(order_[n - 1].path);
      const double rate = expected / times_.of(rows_with(budget, n), budget.kv_tokens);
      if (rate <= best_rate) continue;
      best_rate = rate;
      best = n;
    }
    if (lost_ > kMostLoss * elapsed_) return best;
    const size_t tried = worth_trying(budget, most, best_rate);
    explores_ = tried > 0;
    return explores_ ? tried : best;
  }

  // The fewest nodes whose number of rows nobody has measured, and which would pay if those cost no
  // more than the fewer ones that are measured; 0: there are none. Few rows are tried first: they
  // cost least, and many cost no less. Between 1, 2, 3, 4, 6, 8, 12, ... nodes the line is good
  // enough.
  size_t worth_trying(const StepBudget& budget, size_t most, double best_rate) const {
    double expected = budget.requests;
    double least = times_.of(budget.plain_rows, budget.kv_tokens);
    for (size_t n = 1; n <= most; ++n) {
      expected += static_cast<double>(order_[n - 1].path);
      const int32_t rows = rows_with(budget, n);
      if (times_.most_counted(rows) >= kMeasured) {
        least = std::max(least, times_.of(rows, budget.kv_tokens));
      } else if (expected / least > best_rate && on_grid(n)) {
        return n;
      }
    }
    return 0;
  }

  static bool on_grid(size_t n) {
    return std::has_single_bit(n) || (n % 3 == 0 && std::has_single_bit(n / 3));
  }

  static int32_t rows_with(const StepBudget& budget, size_t nodes) {
    return budget.plain_rows + static_cast<int32_t>(nodes);
  }

  int32_t most_nodes_;
  runtime::StepTimes times_;
  runtime::Calibration calibration_;
  std::unordered_map<RequestId, int32_t> unused_;  // steps without a row for its drafts
  std::vector<Node> order_;
  std::vector<float> best_paths_;  // by draft
  double elapsed_ = 0;
  double lost_ = 0;
  bool explores_ = false;
  int32_t since_plain_ = 0;
};

}  // namespace

std::shared_ptr<DraftController> cost_controller(int32_t most_nodes) {
  return std::make_shared<CostController>(most_nodes);
}

std::shared_ptr<DraftController> fixed_controller(int32_t count) {
  return std::make_shared<FixedController>(count);
}

}  // namespace effinfer
