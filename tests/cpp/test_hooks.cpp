// Hooks of techniques: when they run, what they see, and that a failing one ends its request alone.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "effinfer/speculative.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

namespace {

struct Seen {
  Triggers fired;
  int64_t first = 0;
  int64_t count = 0;
  int64_t length = 0;
  int64_t output = 0;
};

// Keeps what it saw of each request, checked against the cache.
struct Recorder final : StepHook {
  explicit Recorder(const Triggers& when) : wanted(when) {}
  Triggers triggers() const override { return wanted; }
  void run(const StepEvent& event, SequenceState& state) override {
    CHECK_EQ(state.length(), cache->committed(state.id()));
    CHECK_EQ(event.first + event.count, state.length());
    CHECK(event.count > 0);
    seen[event.request].push_back(
        {event.fired, event.first, event.count, state.length(), state.output_tokens()});
    prompts[event.request] = state.prompt_tokens();
  }
  void forget(RequestId id) noexcept override {
    ++forgotten[id];
    seen.erase(id);
  }
  Triggers wanted;
  const KvCache* cache = nullptr;
  std::map<RequestId, std::vector<Seen>> seen;
  std::map<RequestId, int64_t> prompts;
  std::map<RequestId, int> forgotten;
};

// Throws for some requests.
struct Thrower final : StepHook {
  explicit Thrower(const Triggers& when) : wanted(when) {}
  Triggers triggers() const override { return wanted; }
  void run(const StepEvent& event, SequenceState&) override {
    if (bad.contains(event.request)) throw InvalidArgument("[thrower] no more");
    ++runs;
  }
  Triggers wanted;
  std::set<RequestId> bad;
  int runs = 0;
};

}  // namespace

TEST("hooks: each runs when its own trigger fires, and is told which") {
  std::mt19937 random(1);
  const auto prompt_end = std::make_shared<Recorder>(Triggers{true, false, 0, 0});
  const auto pages = std::make_shared<Recorder>(Triggers{false, true, 0, 0});
  const auto every = std::make_shared<Recorder>(Triggers{false, false, 7, 0});
  const auto budget = std::make_shared<Recorder>(Triggers{false, false, 0, 150});
  const std::vector<std::shared_ptr<Recorder>> all = {prompt_end, pages, every, budget};
  Setup setup;
  setup.max_batch_tokens = 40;
  setup.hooks = {all.begin(), all.end()};
  Harness harness(setup);
  for (const auto& hook : all) hook->cache = &harness.engine->cache();
  const std::vector<int32_t> prompt = random_prompt(random, 100);
  const RequestId id = harness.engine->add(prompt, greedy(60));
  std::map<const Recorder*, std::vector<Seen>> last;
  while (harness.engine->has_work()) {
    for (const auto& hook : all) last[hook.get()] = hook->seen[id];
    harness.step();
  }
  CHECK(harness.text(id) == reference(prompt, greedy(60), false));

  // Of 40, 40 and 20 tokens of the prompt, and then of 1: 159 slots, the last token has none.
  const auto& end = last[prompt_end.get()];
  CHECK_EQ(end.size(), 1u);
  CHECK_EQ(end[0].first, 80);
  CHECK_EQ(end[0].length, 100);
  CHECK_EQ(end[0].output, 1);
  CHECK(end[0].fired.prompt_end && !end[0].fired.page_filled);
  CHECK_EQ(prompt_end->prompts[id], 100);
  const auto& filled = last[pages.get()];
  CHECK_EQ(filled.size(), 2u);
  CHECK_EQ(filled[0].first, 40);
  CHECK_EQ(filled[0].length, 80);
  CHECK_EQ(filled[1].length, 128);
  const auto& sevens = last[every.get()];
  CHECK_EQ(sevens.size(), 8u);
  for (size_t i = 0; i < sevens.size(); ++i) {
    CHECK_EQ(sevens[i].length, 100 + 7 * (static_cast<int64_t>(i) + 1));
    CHECK_EQ(sevens[i].fired.every, 7);
  }
  const auto& over = last[budget.get()];
  CHECK_EQ(over.size(), 8u);  // 151 to 158: the request ends in the step of the last slot
  for (size_t i = 0; i < over.size(); ++i) {
    CHECK_EQ(over[i].length, 151 + static_cast<int64_t>(i));
    CHECK_EQ(over[i].fired.over_budget, 150);
    CHECK(!over[i].fired.prompt_end && !over[i].fired.page_filled && over[i].fired.every == 0);
  }
  for (const auto& hook : all) CHECK_EQ(hook->forgotten[id], 1);
}

TEST("hooks: several triggers at once make one event") {
  const auto hook = std::make_shared<Recorder>(Triggers{true, true, 1, 10});
  Setup setup;
  setup.hooks = {hook};
  setup.max_batch_tokens = 64;
  Harness harness(setup);
  hook->cache = &harness.engine->cache();
  std::mt19937 random(2);
  const RequestId id = harness.engine->add(random_prompt(random, 64), greedy(3));
  harness.step();
  CHECK_EQ(hook->seen[id].size(), 1u);
  const Triggers fired = hook->seen[id][0].fired;
  CHECK(fired.prompt_end && fired.page_filled && fired.every == 0 && fired.over_budget == 10);
  harness.step();
  CHECK_EQ(hook->seen[id].size(), 2u);
  CHECK(!hook->seen[id][1].fired.prompt_end && hook->seen[id][1].fired.every == 1);
  harness.finish();
}

TEST("hooks: texts stay, with drafts, preemption, forks and scored prompts") {
  for (const int kind : {0, 1, 2}) {
    const auto hook = std::make_shared<Recorder>(Triggers{true, true, 3, 0});
    Setup setup;
    setup.hooks = {hook};
    if (kind == 1) setup.num_pages = 5;
    if (kind == 2) {
      setup.speculation = {
          {prompt_lookup_proposer(), recycling_proposer()}, nullptr, fixed_controller(4)};
    }
    Harness harness(setup);
    hook->cache = &harness.engine->cache();
    const std::vector<Ask> asks = ragged_requests(7, 10, 130);
    check_texts(harness, asks, false);
    if (kind == 1) CHECK(harness.engine->stats().preemptions > 0);
    // Each is forgotten when it ends, and each time that it lost its pages.
    int forgotten = 0;
    for (const auto& [id, times] : hook->forgotten) forgotten += times;
    CHECK_EQ(forgotten, static_cast<int>(asks.size() +
                                         static_cast<size_t>(harness.engine->stats().preemptions)));
    CHECK(hook->seen.empty());
  }
  const auto hook = std::make_shared<Recorder>(Triggers{true, false, 0, 0});
  Setup setup;
  setup.hooks = {hook};
  Harness harness(setup);
  hook->cache = &harness.engine->cache();
  std::mt19937 random(9);
  std::vector<SamplingParams> params(3, greedy(4));
  params[2].prompt_logprobs = 0;
  const std::vector<RequestId> ids = harness.engine->add_answers(random_prompt(random, 50), params);
  std::map<RequestId, size_t> events;
  while (harness.engine->has_work()) {
    harness.step();
    for (const auto& [id, seen] : hook->seen) events[id] = std::max(events[id], seen.size());
  }
  for (const RequestId id : ids) CHECK_EQ(events[id], 1u);  // forks compute the last token
}

TEST("hooks: one that throws ends its request, with what it was told; the others go on") {
  for (const int kind : {0, 1, 2, 3}) {
    Triggers when;
    if (kind == 0) when.prompt_end = true;
    if (kind == 1) when.page_filled = true;
    if (kind == 2) when.every = 5;
    if (kind == 3) when.over_budget = 20;  // in the prompts' first chunks
    const auto hook = std::make_shared<Thrower>(when);
    Setup setup;
    setup.hooks = {hook};
    Harness harness(setup);
    std::vector<Ask> asks = ragged_requests(11, 8, 100);
    std::vector<RequestId> ids;
    for (size_t i = 0; i < asks.size(); ++i) {
      asks[i].params.max_tokens = 80;
      asks[i].params.prompt_logprobs = i % 4 == 3 ? 0 : -1;
      ids.push_back(harness.engine->add(asks[i].prompt, asks[i].params));
      if (i % 2 == 1) hook->bad.insert(ids.back());
    }
    harness.finish();
    CHECK(hook->runs > 0);
    for (size_t i = 0; i < asks.size(); ++i) {
      SamplingParams params = asks[i].params;
      params.prompt_logprobs = -1;
      const std::vector<int32_t> want = reference(asks[i].prompt, params, false);
      const std::vector<int32_t> got = harness.text(ids[i]);
      const StepOutput& output = harness.outputs.at(ids[i]);
      if (i % 2 == 0) {
        CHECK(got == want);
        CHECK(output.finish == FinishReason::length);
        continue;
      }
      CHECK(output.finish == FinishReason::error);
      CHECK_EQ(output.error, "[thrower] no more");
      CHECK(got.size() < want.size() && std::equal(got.begin(), got.end(), want.begin()));
      if (kind == 0) CHECK_EQ(got.size(), 1u);
      if (kind == 2) CHECK_EQ(got.size(), 6u);
    }
    harness.engine->cache().check_integrity();
  }
}

TEST("hooks: wrong ones are refused") {
  const auto make = [](const std::shared_ptr<StepHook>& hook) {
    Setup setup;
    setup.hooks = {hook};
    Harness harness(setup);
  };
  CHECK_THROWS(InvalidArgument, "hooks[0]: expected a hook, got null", make(nullptr));
  CHECK_THROWS(InvalidArgument, "hooks[0]: expected a trigger, got none",
               make(std::make_shared<Thrower>(Triggers{})));
  CHECK_THROWS(InvalidArgument, "every of at least 1 token, or 0, got -3",
               make(std::make_shared<Thrower>(Triggers{false, false, -3, 0})));
  CHECK_THROWS(InvalidArgument, "over_budget of at least 1 token, or 0, got -1",
               make(std::make_shared<Thrower>(Triggers{true, false, 0, -1})));
}

CHECK_MAIN()
