// The techniques of an engine over the fake model: where steps of a prompt end, which pages are
// shared, whose rows visit all keys, which hooks run.
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "effinfer/graph.h"
#include "effinfer/techniques.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

namespace {

// Where the steps of each request's prompt ended.
struct Ends final : StepHook {
  Triggers triggers() const override { return {false, false, 0, 1}; }
  void run(const StepEvent& event, SequenceState& state) override {
    if (state.length() <= state.prompt_tokens()) ends[event.request].push_back(state.length());
  }

  std::map<RequestId, std::vector<int64_t>> ends;
};

struct Counter final : StepHook {
  explicit Counter(std::string own) : name(std::move(own)) {}
  Triggers triggers() const override { return {true, false, 0, 0}; }
  std::string_view technique() const override { return name; }
  void run(const StepEvent& event, SequenceState&) override { ++runs[event.request]; }
  std::string name;
  std::map<RequestId, int> runs;
};

TechniqueFacts sparse(int64_t min_tokens = 100, int64_t chunk_tokens = 64) {
  TechniqueFacts facts;
  facts.name = "sparse";
  facts.chooses_prompt = true;
  facts.min_tokens = min_tokens;
  facts.chunk_tokens = chunk_tokens;
  return facts;
}

SamplingParams with(SamplingParams params, std::vector<std::string> names) {
  params.techniques = std::move(names);
  return params;
}

Graph graph_with(const std::vector<std::pair<std::string, Attribute>>& metadata) {
  Graph graph;
  for (const auto& [key, value] : metadata) graph.metadata["technique." + key] = value;
  return graph;
}

}  // namespace

TEST("techniques: a graph's metadata says what there are") {
  CHECK(techniques_of(graph_with({})).empty());
  const auto found = techniques_of(graph_with({{"b", std::string("B()")},
                                               {"a", std::string("A()")},
                                               {"a.chooses", std::string("both")},
                                               {"a.min_tokens", int64_t{7}},
                                               {"a.chunk_tokens", int64_t{128}},
                                               {"a.exclusive", std::string("x.y,z")},
                                               {"b.chooses", std::string("output")},
                                               {"b.scores", std::string("both")},
                                               {"b.score_rows", int64_t{9}},
                                               {"b.planes", std::string("b.x,b.y")},
                                               {"b.chunk_tokens", int64_t{64}},
                                               {"b.lossless", true}}));
  CHECK_EQ(found.size(), 2u);
  CHECK(found[0].name == "a" && found[0].chooses_prompt && found[0].chooses_output);
  CHECK(found[0].min_tokens == 7 && found[0].chunk_tokens == 128 && !found[0].lossless);
  CHECK(found[0].exclusive == std::vector<std::string>({"x.y", "z"}));
  CHECK(found[1].name == "b" && !found[1].chooses_prompt && found[1].chooses_output);
  CHECK(found[1].lossless && found[1].exclusive.empty());
  CHECK(found[1].scores_prompt && found[1].scores_output && found[1].score_rows == 9);
  CHECK(found[1].planes == std::vector<std::string>({"b.x", "b.y"}));
  const auto refuse = [](const char* message, const std::string& key, const Attribute& value) {
    CHECK_THROWS(FormatError, message,
                 techniques_of(graph_with({{"a", std::string()}, {key, value}})));
  };
  refuse("technique.a.chooses: expected \"prompt\"", "a.chooses", std::string("keys"));
  refuse("technique.a.min_tokens: expected a number", "a.min_tokens", int64_t{-1});
  refuse("technique.a.chunk_tokens: expected a number", "a.chunk_tokens", std::string("1"));
  refuse("technique.a.scores: expected \"prompt\"", "a.scores", std::string("keys"));
  refuse("technique.a.scores: expected chunk_tokens beside it", "a.scores", std::string("prompt"));
  refuse("technique.a.score_rows: expected a number", "a.score_rows", int64_t{-1});
  refuse("technique.a.lossless: expected true", "a.lossless", int64_t{1});
  refuse("technique.a.other: expected chooses", "a.other", int64_t{1});
  refuse("technique.c: expected an entry of its own", "c.min_tokens", int64_t{1});
  CHECK_THROWS(ConflictError, "z: expected one technique that decides it, got a and b",
               techniques_of(graph_with({{"a", std::string()},
                                         {"b", std::string()},
                                         {"a.exclusive", std::string("x,z")},
                                         {"b.exclusive", std::string("z")}})));
}

TEST("techniques: steps of a prompt end at the same places, whoever else is served") {
  for (const bool one_arithmetic : {false, true}) {
    for (const int kind : {0, 1, 2, 3}) {
      const auto ends = std::make_shared<Ends>();
      Setup setup;
      setup.one_arithmetic = one_arithmetic;
      setup.max_batch_tokens = kind == 1 ? 200 : 64;
      setup.hooks = {ends};
      setup.techniques = {sparse(0)};
      if (kind == 2) setup.num_pages = 8;
      if (kind == 3) setup.prefix_cache = false;
      Harness harness(setup);
      std::vector<Ask> asks = ragged_requests(21, 12, 300);
      for (size_t i = 0; i < asks.size(); i += 5) asks[i].params.prompt_logprobs = 0;
      std::vector<RequestId> ids;
      for (const Ask& ask : asks) ids.push_back(harness.engine->add(ask.prompt, ask.params));
      harness.finish();
      if (kind == 2) CHECK(harness.engine->stats().preemptions > 0);
      for (size_t i = 0; i < asks.size(); ++i) {
        SamplingParams params = asks[i].params;
        params.prompt_logprobs = -1;
        CHECK(harness.text(ids[i]) == reference(asks[i].prompt, params, one_arithmetic));
        const auto size = static_cast<int64_t>(asks[i].prompt.size());
        const int64_t chunk = asks[i].params.prompt_logprobs < 0 ? 64 : 0;
        for (const int64_t end : ends->ends[ids[i]]) {
          CHECK(end == size || chunk == 0 || end % chunk == 0);
        }
      }
    }
  }
}

TEST("techniques: a scored prompt has steps of its own size, whoever else is served") {
  std::vector<std::vector<int64_t>> seen;
  for (const int others : {0, 5}) {
    const auto ends = std::make_shared<Ends>();
    Setup setup;
    setup.max_batch_tokens = 128;
    setup.hooks = {ends};
    setup.techniques = {sparse(0, 128)};
    Harness harness(setup);
    std::mt19937 random(4);
    const std::vector<int32_t> prompt = random_prompt(random, 350);
    std::vector<Ask> asks = ragged_requests(5, others, 200);
    for (Ask& ask : asks) ask.params.prompt_logprobs = 1;
    for (const Ask& ask : asks) harness.engine->add(ask.prompt, ask.params);
    SamplingParams params = greedy(3);
    params.prompt_logprobs = 0;
    const RequestId id = harness.engine->add(prompt, params);
    harness.finish();
    CHECK_EQ(harness.outputs.at(id).prompt.size(), 349u);
    seen.push_back(ends->ends[id]);
  }
  CHECK(seen[0] == seen[1]);
}

TEST("techniques: pages are shared among requests with the same ones, by whole chunks") {
  Setup setup;
  setup.max_batch_tokens = 128;
  setup.techniques = {sparse(100, 128)};
  Harness harness(setup);
  std::mt19937 random(6);
  const std::vector<int32_t> prompt = random_prompt(random, 330);
  const auto cached = [&](const std::vector<int32_t>& tokens, const SamplingParams& params) {
    const RequestId id = harness.engine->add(tokens, params);
    harness.finish();
    return harness.engine->metrics(id).cached_tokens;
  };
  const SamplingParams plain = with(greedy(4), {});
  CHECK_EQ(cached(prompt, greedy(4)), 0);
  CHECK_EQ(cached(prompt, plain), 0);
  CHECK_EQ(cached(prompt, greedy(4)), 256);
  CHECK_EQ(cached(prompt, with(greedy(4), {"sparse"})), 256);
  CHECK_EQ(cached(prompt, plain), 320);
  // A multiple of the chunk leaves a chunk to compute.
  const std::vector<int32_t> even(prompt.begin(), prompt.begin() + 256);
  CHECK_EQ(cached(even, greedy(4)), 128);
  // Below min_tokens it is plain, and finds what plain ones made.
  const std::vector<int32_t> brief(prompt.begin(), prompt.begin() + 90);
  CHECK_EQ(cached(brief, greedy(4)), 64);
  CHECK_EQ(cached(brief, plain), 64);
}

TEST("techniques: several answers that choose keys compute what each would alone") {
  for (const bool chooses : {false, true}) {
    Setup setup;
    setup.max_batch_tokens = 64;
    setup.techniques = {sparse(chooses ? 0 : 1000)};
    Harness harness(setup);
    std::mt19937 random(8);
    const std::vector<int32_t> prompt = random_prompt(random, 150);
    const std::vector<SamplingParams> params(3, greedy(5));
    const std::vector<RequestId> ids = harness.engine->add_answers(prompt, params);
    harness.finish();
    CHECK_EQ(harness.engine->metrics(ids[2]).cached_tokens, chooses ? 128 : 149);
    for (const RequestId id : ids) CHECK(harness.text(id) == reference(prompt, params[0], false));
  }
}

TEST("techniques: requests without one visit all keys where others do not") {
  Setup setup;
  setup.techniques = {sparse(0)};
  setup.max_batch_tokens = 200;
  setup.techniques[0].chunk_tokens = 0;
  setup.techniques.emplace_back().name = "late";
  setup.techniques[1].chooses_output = true;
  Harness harness(setup);
  std::mt19937 random(12);
  const std::vector<int32_t> prompt = random_prompt(random, 70);
  const auto dense = [&](const SamplingParams& params) {
    const int before = harness.log.dense_rows;
    harness.engine->add(random_prompt(random, 70), params);
    harness.engine->add(random_prompt(random, 70), greedy(6));
    harness.finish();
    return harness.log.dense_rows - before;
  };
  CHECK_EQ(dense(greedy(6)), 0);
  CHECK_EQ(dense(with(greedy(6), {})), 70 + 5);
  CHECK_EQ(dense(with(greedy(6), {"late"})), 70);
  CHECK_EQ(dense(with(greedy(6), {"sparse"})), 5);
  CHECK_EQ(dense(with(greedy(6), {"late", "sparse"})), 0);
  // Few rows of a prompt, as of one that ends in a step of its own, are no generated ones.
  const int before = harness.log.dense_rows;
  harness.engine->add(random_prompt(random, 30), greedy(6));
  harness.finish();
  CHECK_EQ(harness.log.dense_rows - before, 30);
  CHECK_THROWS(InvalidArgument, "those of the engine (sparse, late), got \"early\"",
               harness.engine->add(prompt, with(greedy(1), {"early"})));
  Harness none(Setup{});
  CHECK_THROWS(InvalidArgument, "(it has none), got \"late\"",
               none.engine->add(prompt, with(greedy(1), {"late"})));
}

TEST("techniques: one that chooses keys of generated tokens shares plain prompts alone") {
  Setup setup;
  setup.techniques.emplace_back().name = "late";
  setup.techniques[0].chooses_output = true;
  Harness harness(setup);
  std::mt19937 random(13);
  const std::vector<int32_t> prompt = random_prompt(random, 130);
  const RequestId first = harness.engine->add(prompt, greedy(70));
  harness.finish();
  std::vector<int32_t> longer = prompt;
  for (const int32_t token : harness.text(first)) longer.push_back(token);
  const RequestId plain = harness.engine->add(longer, with(greedy(2), {}));
  harness.finish();
  CHECK_EQ(harness.engine->metrics(plain).cached_tokens, 128);  // none of what was generated
}

TEST("techniques: a hook runs for the requests that have its technique") {
  const auto named = std::make_shared<Counter>("counts");
  const auto always = std::make_shared<Counter>("");
  Setup setup;
  setup.hooks = {named, always};
  Harness harness(setup);
  std::mt19937 random(14);
  const std::vector<int32_t> prompt = random_prompt(random, 40);
  const RequestId with_all = harness.engine->add(prompt, greedy(3));
  const RequestId with_one = harness.engine->add(prompt, with(greedy(3), {"counts"}));
  const RequestId without = harness.engine->add(prompt, with(greedy(3), {}));
  harness.finish();
  CHECK(named->runs == (std::map<RequestId, int>{{with_all, 1}, {with_one, 1}}));
  CHECK(always->runs == (std::map<RequestId, int>{{with_all, 1}, {with_one, 1}, {without, 1}}));
}

CHECK_MAIN()
