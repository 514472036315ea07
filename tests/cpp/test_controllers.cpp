// The controller by cost, against steps whose times and acceptance are simulated.
#include <algorithm>
#include <bit>
#include <functional>
#include <random>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/speculative.h"

using namespace effinfer;

namespace {

struct Totals {
  double seconds = 0;
  double plain_seconds = 0;  // of as many tokens one at a time
  int drafted_steps = 0;
  int steps = 0;
  int longest_without_plain = 0;
};

// Requests that each get a chain of `depth` drafts a step; a draft comes true with probability
// `accept`, while its proposer says `claims`.
class Simulation {
 public:
  std::function<double(int32_t rows)> cost;
  double accept = 0.5;
  float claims = 0.5f;
  int requests = 1;
  int depth = 8;
  double noise = 0.0;

  Totals run(DraftController& controller, int steps) {
    std::mt19937 random(5);
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    std::normal_distribution<double> normal(0.0, 1.0);
    Totals totals;
    int since_plain = 0;
    const std::vector<int32_t> text(400, 1);
    for (int step = 0; step < steps; ++step) {
      std::vector<DraftView> views;
      std::vector<Draft> drafts;
      for (int r = 0; r < requests; ++r) {
        DraftView view;
        view.request = r + 1;
        view.tokens = text;
        view.max_nodes = controller.budget(view);
        view.max_depth = 63;
        if (view.max_nodes == 0) continue;
        views.push_back(view);
        drafts.push_back(chain(std::min(depth, view.max_nodes), accept, random, uniform));
      }
      std::vector<uint64_t> keep(views.size(), 0);
      const StepBudget budget = {requests, 96, requests * 400, requests};
      if (!views.empty()) controller.choose(views, drafts, budget, keep);
      check_closed(drafts, keep, budget);
      tell(controller, views, drafts, keep, normal(random), totals);
      since_plain = drafted_ ? since_plain + 1 : 0;
      totals.longest_without_plain = std::max(totals.longest_without_plain, since_plain);
    }
    return totals;
  }

 private:
  // Tokens that come true are 1, as all of the text is.
  Draft chain(int count, double right, std::mt19937& random,
              std::uniform_real_distribution<double>& uniform) const {
    Draft draft;
    for (int i = 0; i < count; ++i) {
      draft.add(uniform(random) < right ? 1 : 2, i - 1, claims);
      draft.sources.push_back(0);
    }
    return draft;
  }

  static void check_closed(const std::vector<Draft>& drafts, const std::vector<uint64_t>& keep,
                           const StepBudget& budget) {
    int rows = 0;
    for (size_t i = 0; i < drafts.size(); ++i) {
      rows += std::popcount(keep[i]);
      CHECK(keep[i] >> drafts[i].size() == 0);
      for (int32_t node = 0; node < drafts[i].size(); ++node) {
        const int32_t parent = drafts[i].parents[static_cast<size_t>(node)];
        const bool kept = (keep[i] >> node & 1) != 0;
        CHECK(!kept || parent < 0 || (keep[i] >> parent & 1) != 0);
      }
    }
    CHECK(rows <= budget.draft_rows);
  }

  void tell(DraftController& controller, const std::vector<DraftView>& views,
            const std::vector<Draft>& drafts, const std::vector<uint64_t>& keep, double jitter,
            Totals& totals) {
    const std::vector<int32_t> text(500, 1);
    std::vector<StepFacts> facts;
    int32_t draft_rows = 0;
    size_t tokens = 0;
    for (int r = 0; r < requests; ++r) {
      StepFacts fact;
      fact.request = r + 1;
      fact.tokens = text;
      fact.num_emitted = 1;
      for (size_t i = 0; i < views.size(); ++i) {
        if (views[i].request != r + 1) continue;
        fact.proposed = &drafts[i];
        const int32_t kept = std::popcount(keep[i]);
        draft_rows += kept;
        for (int32_t n = 0; n < kept && drafts[i].tokens[static_cast<size_t>(n)] == 1; ++n) {
          ++fact.num_emitted;
        }
      }
      tokens += fact.num_emitted;
      facts.push_back(fact);
    }
    StepCost step;
    step.rows = requests + draft_rows;
    step.draft_rows = draft_rows;
    step.kv_tokens = requests * 400;
    step.seconds = cost(step.rows) * std::max(0.5, 1.0 + noise * jitter);
    step.decoding = true;
    controller.observe(step, facts);
    drafted_ = draft_rows > 0;
    totals.steps += 1;
    totals.drafted_steps += drafted_;
    totals.seconds += step.seconds;
    totals.plain_seconds += cost(requests) * static_cast<double>(tokens) / requests;
  }

  bool drafted_ = false;
};

}  // namespace

TEST("where a row costs a plain step nothing is drafted, but for what exploring may cost") {
  for (const int requests : {1, 4, 8}) {
    Simulation simulation;
    simulation.cost = [requests](int32_t rows) { return 1e-3 * rows / requests; };
    simulation.accept = 0.6;
    simulation.requests = requests;
    const auto controller = cost_controller();
    const Totals totals = simulation.run(*controller, 3000);
    CHECK(totals.drafted_steps < totals.steps / 20);
    // 1 %, and what the last exploration took beyond it.
    CHECK(totals.seconds <= 1.02 * totals.plain_seconds);
  }
}

TEST(
    "where rows are free everything likely is drafted, and a plain step is measured now and then") {
  for (const double noise : {0.0, 0.1}) {
    Simulation simulation;
    simulation.cost = [](int32_t rows) { return 1e-3 * (1.0 + 0.002 * rows); };
    simulation.accept = 0.7;
    simulation.noise = noise;
    const auto controller = cost_controller();
    const Totals totals = simulation.run(*controller, 3000);
    CHECK(totals.drafted_steps > totals.steps * 9 / 10);
    CHECK(totals.seconds < 0.5 * totals.plain_seconds);
    CHECK(totals.longest_without_plain >= 32);
    CHECK(totals.longest_without_plain <= 160);
  }
}

TEST("drafts that never come true are given up, whatever their proposer claims") {
  for (const double noise : {0.0, 0.15}) {
    Simulation simulation;
    simulation.cost = [](int32_t rows) { return 1e-3 * (1.0 + 0.1 * (rows - 1)); };
    simulation.accept = 0.0;
    simulation.claims = 0.95f;
    simulation.noise = noise;
    const auto controller = cost_controller();
    const Totals totals = simulation.run(*controller, 3000);
    CHECK(totals.drafted_steps < totals.steps / 10);
    CHECK(totals.seconds <= 1.03 * totals.plain_seconds);
  }
}

TEST("noisy times cost no more than 2 %, and leave most of the gain") {
  for (const double accept : {0.2, 0.5, 0.8}) {
    Simulation simulation;
    simulation.cost = [](int32_t rows) { return 1e-3 * (1.0 + 0.15 * (rows - 1)); };
    simulation.accept = accept;
    simulation.noise = 0.1;
    const auto controller = cost_controller();
    const Totals totals = simulation.run(*controller, 4000);
    CHECK(totals.seconds <= 1.02 * totals.plain_seconds);
    if (accept == 0.8) CHECK(totals.seconds < 0.75 * totals.plain_seconds);
  }
}

TEST("trees of many requests keep parents with their children and to the rows that are left") {
  std::mt19937 random(8);
  const auto controller = cost_controller(63);
  const std::vector<int32_t> text(100, 1);
  bool any = false;
  for (int step = 0; step < 400; ++step) {
    std::vector<DraftView> views(1 + random() % 6);
    std::vector<Draft> drafts(views.size());
    for (size_t i = 0; i < views.size(); ++i) {
      views[i].request = static_cast<RequestId>(i) + 1;
      views[i].tokens = text;
      const auto nodes = static_cast<int32_t>(random() % 64);
      for (int32_t n = 0; n < nodes; ++n) {
        drafts[i].add(static_cast<int32_t>(random() % 5),
                      static_cast<int32_t>(random() % static_cast<uint32_t>(n + 1)) - 1,
                      static_cast<float>(random() % 101) / 100.0f);
        drafts[i].sources.push_back(static_cast<uint8_t>(random() % 3));
      }
    }
    const auto rows = static_cast<int32_t>(views.size());
    const StepBudget budget = {rows, static_cast<int32_t>(random() % 97), rows * 100, rows};
    std::vector<uint64_t> keep(views.size(), 0);
    controller->choose(views, drafts, budget, keep);
    int32_t kept = 0;
    for (size_t i = 0; i < drafts.size(); ++i) {
      kept += std::popcount(keep[i]);
      for (int32_t n = 0; n < 64; ++n) {
        if ((keep[i] >> n & 1) == 0) continue;
        CHECK(n < drafts[i].size());
        const int32_t parent = drafts[i].parents[static_cast<size_t>(n)];
        CHECK(parent < 0 || (keep[i] >> parent & 1) != 0);
      }
    }
    CHECK(kept <= budget.draft_rows);
    any |= kept > 0;
    std::vector<StepFacts> facts(views.size());
    for (size_t i = 0; i < facts.size(); ++i) {
      facts[i].request = views[i].request;
      facts[i].tokens = text;
      facts[i].num_emitted = 1 + random() % 4;
      facts[i].proposed = &drafts[i];
    }
    controller->observe({rows + kept, kept, rows * 100, 1e-3, 1e-5, true}, facts);
    if (random() % 8 == 0) controller->forget(1);
  }
  CHECK(any);
}

TEST("numbers of nodes that no draft can have are refused") {
  for (const int32_t count : {0, -1, 64, INT32_MAX}) {
    CHECK_THROWS(InvalidArgument, "expected 1..63", cost_controller(count));
    CHECK_THROWS(InvalidArgument, "expected 1..63", fixed_controller(count));
  }
}

CHECK_MAIN()
