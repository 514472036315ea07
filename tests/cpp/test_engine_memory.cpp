// A step of the engine takes no memory but for what it returns: the global operator new counts.
#include <algorithm>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "check.h"
#include "count_allocations.h"
#include "effinfer/speculative.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

namespace {

// Knows when drafts for a request are asked for the first time, which a controller may do late: a
// proposer then takes memory for the request's text.
class Meetings final : public Proposer {
 public:
  Meetings() { known_.reserve(16); }
  std::string_view name() const override { return "meetings"; }
  void propose(std::span<const DraftView> views, std::span<Draft>) override {
    for (const DraftView& view : views) {
      if (std::find(known_.begin(), known_.end(), view.request) != known_.end()) continue;
      known_.push_back(view.request);
    }
  }
  size_t count() const { return known_.size(); }

 private:
  std::vector<RequestId> known_;
};

Speculation native_parts(std::shared_ptr<Meetings> meetings,
                         std::shared_ptr<DraftController> controller) {
  return {{suffix_proposer(), prompt_lookup_proposer(), recycling_proposer(), std::move(meetings)},
          nullptr,
          std::move(controller)};
}

// Steps until nothing is left to do: how many of those after the first `warm`, in which drafts for
// no request were asked for the first time, took more memory than the vector of outputs and one of
// tokens for each.
int greedy_steps(EngineCore& engine, int warm, const Meetings& meetings) {
  int steps = 0;
  int wrong = 0;
  while (engine.has_work()) {
    const size_t known = meetings.count();
    const int64_t before = allocations.load();
    const std::vector<StepOutput> outputs = engine.step();
    const int64_t taken = allocations.load() - before;
    bool ended = false;
    for (const StepOutput& output : outputs) ended |= output.finish != FinishReason::none;
    const auto returned = static_cast<int64_t>(outputs.size()) + 1;
    const bool met = meetings.count() > known;
    if (++steps > warm && !ended && !met && taken != returned) {
      ++wrong;
      std::fprintf(stderr, "step %d: %d allocations, %d expected\n", steps, static_cast<int>(taken),
                   static_cast<int>(returned));
    }
  }
  CHECK(steps > warm + 20);
  return wrong;
}

}  // namespace

// Runs when something is filled or over, which takes longer than the test.
struct Patient final : StepHook {
  Triggers triggers() const override { return {false, false, 1 << 20, 1 << 20}; }
  void run(const StepEvent&, SequenceState&) override { ++runs; }
  int runs = 0;
};

TEST("a step allocates nothing, with and without drafts, across pages") {
  for (const int kind : {0, 1, 2, 3}) {
    Setup setup;
    setup.max_batch_tokens = 160;
    const auto meetings = std::make_shared<Meetings>();
    if (kind == 1) setup.speculation = native_parts(meetings, fixed_controller(6));
    if (kind == 2) setup.speculation = native_parts(meetings, cost_controller());
    const auto hook = std::make_shared<Patient>();
    if (kind == 3) setup.hooks = {hook, hook};
    Harness harness(setup);
    std::vector<int32_t> prompt;
    for (int i = 0; i < 40; ++i) prompt.push_back(i % 5);
    std::vector<RequestId> ids;
    for (int i = 0; i < 3; ++i) {
      SamplingParams params = greedy(200);
      params.logit_bias = {{i, 100.0f}, {i + 10, 90.0f}};  // texts that repeat
      params.frequency_penalty = 0.9f;
      ids.push_back(harness.engine->add(prompt, params));
      prompt.push_back(i);
    }
    CHECK_EQ(greedy_steps(*harness.engine, 12, *meetings), 0);
    for (const RequestId id : ids) {
      const SpeculationMetrics metrics = harness.engine->metrics(id).speculation;
      CHECK_EQ(metrics.refused_drafts, 0);
      if (kind == 1) CHECK(metrics.accepted > 20);
    }
    CHECK_EQ(hook->runs, 0);
  }
}

CHECK_MAIN()
