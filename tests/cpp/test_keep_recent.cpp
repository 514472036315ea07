// Sinks and recent keys in the engine: what is kept, and that a preempted request comes back with
// it.
#include <random>
#include <vector>

#include "check.h"
#include "effinfer/residency.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

namespace {

std::shared_ptr<StepHook> rule(int64_t sinks = 4, int64_t recent = 124, int64_t stride = 64) {
  return keep_recent({sinks, recent, stride, true});
}

std::vector<std::vector<int32_t>> texts(Setup setup, int64_t* preemptions) {
  std::mt19937 random(4);
  Harness harness(setup);
  std::vector<RequestId> ids;
  for (size_t i = 0; i < 4; ++i) {
    SamplingParams params;
    params.temperature = 0.0f;
    params.max_tokens = 230;
    ids.push_back(harness.engine->add(random_prompt(random, 20 + 40 * i), params));
  }
  harness.finish();
  std::vector<std::vector<int32_t>> all;
  for (const RequestId id : ids) {
    CHECK_EQ(harness.outputs.at(id).error, "");
    all.push_back(harness.text(id));
  }
  *preemptions = harness.engine->stats().preemptions;
  return all;
}

}  // namespace

// The fake model's text depends on every key that it reads, and its keys on their phase.
TEST("a text over few slots does not depend on who takes its pages") {
  Setup setup;
  setup.hooks = {rule()};
  int64_t preemptions = 0;
  const auto expected = texts(setup, &preemptions);
  CHECK_EQ(preemptions, 0);
  for (const bool prefix_cache : {true, false}) {
    setup.num_pages = 7;
    setup.prefix_cache = prefix_cache;
    CHECK(texts(setup, &preemptions) == expected);
    CHECK(preemptions > 0);
  }
  Setup plain;
  CHECK(texts(plain, &preemptions) != expected);
}

TEST("between steps there are sinks and recent slots at most, at positions of their own") {
  for (const int64_t stride : {1, 7, 64}) {
    Setup setup;
    setup.hooks = {rule(3, 90, stride)};
    Harness harness(setup);
    std::mt19937 random(5);
    SamplingParams params;
    params.temperature = 0.0f;
    params.max_tokens = 200;
    const RequestId id = harness.engine->add(random_prompt(random, 150), params);
    const KvCache& cache = harness.engine->cache();
    int64_t last = 0;
    while (harness.engine->has_work()) {
      harness.step();
      if (!harness.engine->has_work()) break;
      CHECK(cache.slots(0) <= 93);
      CHECK(last < 93 || cache.slots(0) >= 93 - stride);
      CHECK_EQ(cache.next_position(0), cache.slots(0));
      last = cache.slots(0);
    }
    CHECK_EQ(cache.cached_prefix_pages(), 0);  // of a prompt that was over the budget
    CHECK_EQ(harness.text(id).size(), 200u);
  }
}

TEST("bad rules are refused") {
  CHECK_THROWS(InvalidArgument, "sinks", rule(-1));
  CHECK_THROWS(InvalidArgument, "recent: expected at least 64 (stride), got 63", rule(4, 63));
  CHECK_THROWS(InvalidArgument, "stride", rule(4, 63, 0));
}

CHECK_MAIN()
