// A step of the engine takes no memory but for what it returns: the global operator new counts.
#include <vector>

#include "check.h"
#include "count_allocations.h"
#include "effinfer/speculative.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

namespace {

Speculation native_parts(std::shared_ptr<DraftController> controller) {
  return {{suffix_proposer(), prompt_lookup_proposer(), recycling_proposer()},
          nullptr,
          std::move(controller)};
}

// Steps until nothing is left to do: how many of those after the first `warm` took more memory than
// the vector of outputs and one of tokens for each.
int greedy_steps(EngineCore& engine, int warm) {
  int steps = 0;
  int wrong = 0;
  while (engine.has_work()) {
    const int64_t before = allocations.load();
    const std::vector<StepOutput> outputs = engine.step();
    const int64_t taken = allocations.load() - before;
    bool ended = false;
    for (const StepOutput& output : outputs) ended |= output.finish != FinishReason::none;
    const auto returned = static_cast<int64_t>(outputs.size()) + 1;
    if (++steps > warm && !ended && taken != returned) {
      ++wrong;
      std::fprintf(stderr, "step %d: %d allocations, %d expected\n", steps, static_cast<int>(taken),
                   static_cast<int>(returned));
    }
  }
  CHECK(steps > warm + 20);
  return wrong;
}

}  // namespace

TEST("a step allocates nothing, with and without drafts, across pages") {
  for (const int kind : {0, 1, 2}) {
    Setup setup;
    setup.max_batch_tokens = 160;
    if (kind == 1) setup.speculation = native_parts(fixed_controller(6));
    if (kind == 2) setup.speculation = native_parts(cost_controller());
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
    CHECK_EQ(greedy_steps(*harness.engine, 12), 0);
    for (const RequestId id : ids) {
      const SpeculationMetrics metrics = harness.engine->metrics(id).speculation;
      CHECK_EQ(metrics.refused_drafts, 0);
      if (kind == 1) CHECK(metrics.accepted > 20);
    }
  }
}

CHECK_MAIN()
