// Several answers to one prompt, which share its pages, and log-probabilities of prompts.
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "effinfer/constraint.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

namespace {

// Allows the tokens of one parity.
class Parity final : public TokenConstraint {
 public:
  explicit Parity(int32_t rest) : rest_(rest) {}
  void fill(std::span<uint32_t> allowed) override {
    for (uint32_t& word : allowed) word = rest_ == 0 ? 0x55555555u : 0xAAAAAAAAu;
  }
  bool accept(int32_t token) override { return token % 2 == rest_; }
  void rollback(int32_t) override {}
  bool ended() const override { return false; }

 private:
  int32_t rest_;
};

struct Group {
  std::vector<int32_t> prompt;
  std::vector<SamplingParams> params;
};

std::vector<Group> random_groups(uint32_t seed, int count) {
  std::mt19937 random(seed);
  std::vector<Group> groups;
  for (int g = 0; g < count; ++g) {
    Group group;
    // Whole pages, parts of one, a single token.
    const size_t sizes[] = {1, 64, 65, 128, 1 + random() % 140};
    group.prompt = random_prompt(random, sizes[static_cast<size_t>(g) % 5]);
    const uint64_t first = random();
    for (uint64_t i = 0; i < 1 + random() % 5; ++i) {
      SamplingParams params = greedy(1 + static_cast<int32_t>(random() % 70));
      params.temperature = 1.0f;
      params.top_k = g % 2 == 0 ? 4 : 0;
      params.repetition_penalty = g % 3 == 0 ? 1.1f : 1.0f;
      params.seed = first + i;
      group.params.push_back(params);
    }
    groups.push_back(group);
  }
  return groups;
}

double log_probability(const std::vector<int32_t>& tokens, size_t place, bool one_arithmetic) {
  std::vector<int32_t> contents;
  for (size_t i = 0; i < place; ++i) {
    contents.push_back(content(tokens[i], Phase::prefill, one_arithmetic));
  }
  std::vector<float> row(kVocab);
  fill_logits(contents, row.data());
  double highest = -HUGE_VAL;
  for (const float logit : row) highest = std::max(highest, static_cast<double>(logit));
  double sum = 0.0;
  for (const float logit : row) sum += std::exp(static_cast<double>(logit) - highest);
  return static_cast<double>(row[static_cast<size_t>(tokens[place])]) - highest - std::log(sum);
}

void check_scores(const std::vector<int32_t>& prompt, const StepOutput& output, int32_t top,
                  bool one_arithmetic) {
  CHECK_EQ(output.prompt.size(), prompt.size() - 1);
  for (size_t i = 0; i < output.prompt.size(); ++i) {
    const SampledToken& token = output.prompt[i];
    CHECK_EQ(token.token, prompt[i + 1]);
    const double want = log_probability(prompt, i + 1, one_arithmetic);
    CHECK(std::abs(static_cast<double>(token.logprob) - want) < 1e-5 * (1.0 + std::abs(want)));
    CHECK_EQ(token.top.size(), static_cast<size_t>(top));
    if (top > 0) CHECK(token.top.front().logprob >= token.logprob);
  }
}

SamplingParams scoring(int32_t max_tokens, int32_t top = 0) {
  SamplingParams params = greedy(max_tokens);
  params.prompt_logprobs = top;
  return params;
}

}  // namespace

TEST("answers have the texts that they would have alone") {
  const std::vector<Group> groups = random_groups(3, 10);
  for (const bool one_arithmetic : {false, true}) {
    for (const bool prefix_cache : {false, true}) {
      for (const int32_t pages : {6, 128}) {
        for (const bool drafts : {false, true}) {
          Setup setup;
          setup.one_arithmetic = one_arithmetic;
          setup.prefix_cache = prefix_cache;
          setup.num_pages = pages;
          if (drafts) {
            setup.speculation.proposers = {recycling_proposer({.width = 3}), suffix_proposer()};
            setup.speculation.controller = fixed_controller(5);
          }
          Harness harness(setup);
          std::vector<std::vector<RequestId>> ids;
          for (const Group& group : groups) {
            ids.push_back(harness.engine->add_answers(group.prompt, group.params));
          }
          harness.finish();
          for (size_t g = 0; g < groups.size(); ++g) {
            CHECK_EQ(ids[g].size(), groups[g].params.size());
            for (size_t i = 0; i < ids[g].size(); ++i) {
              CHECK(harness.text(ids[g][i]) ==
                    reference(groups[g].prompt, groups[g].params[i], one_arithmetic));
            }
          }
        }
      }
    }
  }
}

TEST("one answer computes the prompt, the others its last token, and they share its pages") {
  std::mt19937 random(1);
  const std::vector<int32_t> prompt = random_prompt(random, 200);
  for (const bool prefix_cache : {false, true}) {
    Harness harness({.one_arithmetic = false, .prefix_cache = prefix_cache});
    std::vector<SamplingParams> params(4, greedy(20));
    for (uint64_t i = 0; i < 4; ++i) {
      params[i].temperature = 1.0f;
      params[i].seed = i;
    }
    const auto ids = harness.engine->add_answers(prompt, params);
    const RequestId other = harness.engine->add(random_prompt(random, 10), greedy(3));
    int32_t most = 0;
    while (harness.engine->has_work()) {
      harness.step();
      const KvCache& cache = harness.engine->cache();
      most = std::max(most, cache.config().num_pages - cache.free_pages());
    }
    CHECK_EQ(harness.log.prefill_rows, 200 + 3 + 10);
    // Three whole pages in common, a page each, and one of the other request.
    CHECK(most <= 3 + 4 + 1);
    CHECK(harness.outputs.at(other).finish == FinishReason::length);
    CHECK_EQ(harness.engine->metrics(ids[0]).cached_tokens, 0);
    for (size_t i = 1; i < 4; ++i) {
      CHECK_EQ(harness.engine->metrics(ids[i]).cached_tokens, 199);
      CHECK(harness.text(ids[i]) == reference(prompt, params[i], false));
    }
    CHECK(harness.text(ids[0]) != harness.text(ids[1]));
  }
}

TEST("the prompt is computed once, however soon the first answer ends") {
  std::mt19937 random(12);
  for (const bool prefix_cache : {false, true}) {
    for (const int64_t sequences : {1, 3, 8}) {
      Harness harness(
          {.one_arithmetic = true, .max_sequences = sequences, .prefix_cache = prefix_cache});
      const std::vector<int32_t> prompt = random_prompt(random, 100);
      std::vector<SamplingParams> params(6, greedy(1));
      for (uint64_t i = 0; i < 6; ++i) {
        params[i].temperature = 1.0f;
        params[i].seed = i;
      }
      const auto ids = harness.engine->add_answers(prompt, params);
      harness.finish();
      CHECK_EQ(harness.log.prefill_rows + harness.log.decode_rows, 100 + 5);
      for (size_t i = 0; i < 6; ++i)
        CHECK(harness.text(ids[i]) == reference(prompt, params[i], true));
    }
  }
}

TEST("a kept prompt gives its pages to whoever needs them") {
  std::mt19937 random(13);
  // Three pages: the prompt has two, and a request of all of them comes between its answers.
  Harness harness({.one_arithmetic = true, .num_pages = 3, .max_sequences = 1});
  const std::vector<int32_t> prompt = random_prompt(random, 100);
  const std::vector<SamplingParams> params(2, greedy(1));
  const auto ids = harness.engine->add_answers(prompt, params);
  while (harness.outputs.count(ids[0]) == 0) harness.step();
  CHECK(harness.engine->cache().available_pages() < 3);
  harness.engine->cancel(ids[1]);
  const std::vector<int32_t> other = random_prompt(random, 190);
  const RequestId large = harness.engine->add(other, greedy(2));
  harness.finish();
  CHECK(harness.text(large) == reference(other, greedy(2), true));
}

TEST("short answers and long ones share few pages") {
  for (uint32_t round = 0; round < 40; ++round) {
    std::mt19937 random(round);
    std::vector<Group> groups = random_groups(100 + round, 6);
    for (Group& group : groups) {
      for (SamplingParams& params : group.params) {
        if (random() % 2 == 0) params.max_tokens = 1 + static_cast<int32_t>(random() % 3);
      }
    }
    Setup setup;
    setup.one_arithmetic = round % 2 == 0;
    setup.prefix_cache = round % 3 == 0;
    setup.num_pages = 4 + static_cast<int32_t>(random() % 5);
    setup.max_sequences = 1 + static_cast<int64_t>(random() % 4);
    Harness harness(setup);
    std::vector<std::vector<RequestId>> ids;
    for (const Group& group : groups) {
      ids.push_back(harness.engine->add_answers(group.prompt, group.params));
    }
    harness.finish();
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < ids[g].size(); ++i) {
        CHECK(harness.text(ids[g][i]) ==
              reference(groups[g].prompt, groups[g].params[i], setup.one_arithmetic));
      }
    }
  }
}

TEST("a long prompt's other answers keep nobody waiting") {
  std::mt19937 random(5);
  Harness harness({.one_arithmetic = true});
  const std::vector<SamplingParams> params(3, greedy(4));
  harness.engine->add_answers(random_prompt(random, 300), params);
  harness.step();
  const RequestId beside = harness.engine->add(random_prompt(random, 5), greedy(1));
  int steps = 0;
  while (harness.outputs.count(beside) == 0 && steps < 100) {
    harness.step();
    ++steps;
  }
  CHECK(steps < 12);  // of the 300 tokens 32 go into a step
  harness.finish();
}

TEST("cancelled in any step, by whichever answer, the others go on") {
  std::mt19937 random(9);
  const std::vector<Group> groups = random_groups(11, 5);
  for (int round = 0; round < 60; ++round) {
    const Group& group = groups[static_cast<size_t>(round) % groups.size()];
    if (group.params.size() < 2) continue;
    Setup setup;
    setup.one_arithmetic = round % 2 == 0;
    setup.prefix_cache = round % 3 == 0;
    setup.num_pages = round % 4 == 0 ? 6 : 64;
    Harness harness(setup);
    const auto ids = harness.engine->add_answers(group.prompt, group.params);
    for (unsigned i = random() % 12; i > 0; --i) harness.step();
    const size_t gone = round % 2 == 0 ? 0 : random() % ids.size();
    harness.engine->cancel(ids[gone]);
    harness.finish();
    for (size_t i = 0; i < ids.size(); ++i) {
      if (i == gone) continue;
      CHECK(harness.text(ids[i]) == reference(group.prompt, group.params[i], setup.one_arithmetic));
    }
  }
}

TEST("each answer has a constraint of its own") {
  Harness harness({.one_arithmetic = true});
  std::mt19937 random(2);
  std::vector<SamplingParams> params(3, greedy(30));
  const std::vector<std::shared_ptr<TokenConstraint>> constraints = {
      std::make_shared<Parity>(0), nullptr, std::make_shared<Parity>(1)};
  const std::vector<int32_t> prompt = random_prompt(random, 90);
  const auto ids = harness.engine->add_answers(prompt, params, constraints);
  harness.finish();
  for (const int32_t token : harness.text(ids[0])) CHECK_EQ(token % 2, 0);
  CHECK(harness.text(ids[1]) == reference(prompt, params[1], true));
  for (const int32_t token : harness.text(ids[2])) CHECK_EQ(token % 2, 1);
}

TEST("answers that fail leave the others, and wrong ones are refused together") {
  Harness harness({.one_arithmetic = true});
  std::vector<SamplingParams> params(3, greedy(10));
  for (int32_t token = 0; token < kVocab; ++token) params[0].bad_words.push_back({token});
  const std::vector<int32_t> prompt = {1, 2, 3};
  const auto ids = harness.engine->add_answers(prompt, params);
  harness.finish();
  CHECK(harness.outputs.at(ids[0]).finish == FinishReason::error);
  for (size_t i = 1; i < 3; ++i) CHECK(harness.text(ids[i]) == reference(prompt, params[i], true));

  EngineCore& engine = *harness.engine;
  CHECK_THROWS(InvalidArgument, "params: expected at least one", engine.add_answers(prompt, {}));
  const std::vector<std::shared_ptr<TokenConstraint>> two(2);
  CHECK_THROWS(InvalidArgument, "constraints: expected none or 3",
               engine.add_answers(prompt, params, two));
  params[2].top_p = 2.0f;
  CHECK_THROWS(InvalidArgument, "top_p", engine.add_answers(prompt, params));
  CHECK(!engine.has_work());
}

TEST("prompts are scored in chunks of any size, beside others, with few pages or many") {
  std::mt19937 random(4);
  for (const bool one_arithmetic : {false, true}) {
    for (const int32_t pages : {6, 64}) {
      for (const bool drafts : {false, true}) {
        Setup setup;
        setup.one_arithmetic = one_arithmetic;
        setup.num_pages = pages;
        if (drafts) {
          setup.speculation.proposers = {recycling_proposer({.width = 3}), suffix_proposer()};
          setup.speculation.controller = fixed_controller(5);
        }
        Harness harness(setup);
        std::vector<Ask> asks;
        std::vector<RequestId> ids;
        for (int i = 0; i < 14; ++i) {
          SamplingParams params = i % 2 == 0 ? scoring(i % 4 == 0 ? 12 : 0, i % 3) : greedy(20);
          asks.push_back({random_prompt(random, 1 + random() % 150), params});
          // Prompts of which the cache knows the beginning.
          if (i > 10) asks.back().prompt = asks[static_cast<size_t>(i) - 10].prompt;
          ids.push_back(harness.engine->add(asks.back().prompt, params));
        }
        harness.finish();
        for (size_t i = 0; i < asks.size(); ++i) {
          const StepOutput& output = harness.outputs.at(ids[i]);
          CHECK(output.finish == FinishReason::length);
          CHECK(harness.text(ids[i]) == reference(asks[i].prompt, asks[i].params, one_arithmetic));
          if (asks[i].params.prompt_logprobs < 0) {
            CHECK(output.prompt.empty());
          } else {
            check_scores(asks[i].prompt, output, asks[i].params.prompt_logprobs, one_arithmetic);
          }
        }
      }
    }
  }
}

TEST("an engine of one sequence and one row a step scores prompts too") {
  std::mt19937 random(6);
  Harness harness({.one_arithmetic = true, .max_batch_tokens = 1, .max_sequences = 1});
  const std::vector<int32_t> prompt = random_prompt(random, 70);
  const RequestId id = harness.engine->add(prompt, scoring(0, 2));
  harness.finish();
  check_scores(prompt, harness.outputs.at(id), 2, true);
}

TEST("the first of several answers scores the prompt for all") {
  std::mt19937 random(7);
  Harness harness({.one_arithmetic = false});
  const std::vector<int32_t> prompt = random_prompt(random, 100);
  const std::vector<SamplingParams> params = {scoring(9, 1), greedy(9), greedy(9)};
  const auto ids = harness.engine->add_answers(prompt, params);
  harness.finish();
  CHECK_EQ(harness.log.prefill_rows, 100 + 2);
  check_scores(prompt, harness.outputs.at(ids[0]), 1, false);
  for (const RequestId id : ids) CHECK(harness.text(id) == reference(prompt, greedy(9), false));
}

TEST("a prompt that fills the context is scored, and a broken one ends its request") {
  std::mt19937 random(8);
  Harness harness({.num_pages = 2, .max_seq_len = 128});
  const std::vector<int32_t> full = random_prompt(random, 128);
  CHECK_THROWS(InvalidArgument, "at most 127", harness.engine->add(full, scoring(1)));
  const RequestId id = harness.engine->add(full, scoring(0));
  harness.finish();
  check_scores(full, harness.outputs.at(id), 0, false);
  std::vector<int32_t> broken = random_prompt(random, 40);
  broken[20] = kPoison;
  const RequestId bad = harness.engine->add(broken, scoring(0));
  harness.finish();
  CHECK(harness.outputs.at(bad).finish == FinishReason::error);
  CHECK(harness.outputs.at(bad).error.find("NaN") != std::string::npos);
  CHECK_THROWS(InvalidArgument, "max_tokens", harness.engine->add(broken, greedy(0)));
}

CHECK_MAIN()
