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

TEST("drafts change no text: they end where slots are dropped") {
  for (const int64_t stride : {1, 7, 64}) {
    Setup setup;
    setup.hooks = {rule(4, 124, stride)};
    int64_t preemptions = 0;
    const auto expected = texts(setup, &preemptions);
    setup.speculation = {
        {prompt_lookup_proposer(), recycling_proposer()}, nullptr, fixed_controller(6)};
    CHECK(texts(setup, &preemptions) == expected);
  }
}

TEST("a prompt's cached prefix is no longer than what stays") {
  Setup setup;
  setup.max_batch_tokens = 64;
  setup.hooks = {rule(4, 124)};
  std::mt19937 random(6);
  const std::vector<int32_t> prompt = random_prompt(random, 128);  // as many as stay
  std::vector<int32_t> longer = prompt;
  for (int32_t token = 0; token < 150; ++token) longer.push_back(token % 7);
  Harness alone(setup);
  const RequestId expected = alone.engine->add(longer, greedy(20));
  alone.finish();
  Harness harness(setup);
  harness.engine->add(prompt, greedy(1));
  harness.finish();
  CHECK_EQ(harness.engine->cache().cached_prefix_pages(), 2);
  const RequestId id = harness.engine->add(longer, greedy(20));
  harness.finish();
  CHECK_EQ(harness.engine->metrics(id).cached_tokens, 128);
  CHECK(harness.text(id) == alone.text(expected));
  setup.hooks = {rule(4, 92)};
  Harness fewer(setup);
  fewer.engine->add(prompt, greedy(1));
  fewer.finish();
  const RequestId other = fewer.engine->add(longer, greedy(20));
  fewer.finish();
  CHECK_EQ(fewer.engine->metrics(other).cached_tokens, 64);
}

TEST("a text may be longer than what there is room for") {
  Setup setup;
  setup.max_batch_tokens = 64;
  setup.max_seq_len = 192;
  setup.num_pages = 3;
  setup.hooks = {rule(4, 124)};
  Harness harness(setup);
  std::mt19937 random(7);
  const RequestId id = harness.engine->add(random_prompt(random, 1000), greedy(500));
  harness.finish();
  CHECK_EQ(harness.outputs.at(id).error, "");
  CHECK_EQ(harness.text(id).size(), 500u);
  setup.hooks = {rule(4, 125)};  // which leaves no room for a step
  Harness fewer(setup);
  CHECK_THROWS(InvalidArgument, "prompt: expected at most 191",
               fewer.engine->add(random_prompt(random, 192), greedy(1)));
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
