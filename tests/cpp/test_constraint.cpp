// Requests whose tokens a constraint allows: over the fake model, alone and in batches, with
// drafts, preemption and constraints that fail.
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "effinfer/constraint.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

namespace {

// A token may follow where 7 (sum of the tokens before) + token leaves 0 or 1 divided by 5, and
// nothing after `length` tokens.
class Sums final : public TokenConstraint {
 public:
  explicit Sums(size_t length) : length_(length) {}
  static bool allows(int64_t sum, int32_t token) { return (7 * sum + token) % 5 < 2; }

  void fill(std::span<uint32_t> allowed) override {
    CHECK_EQ(allowed.size(), static_cast<size_t>(kVocab + 31) / 32);
    for (uint32_t& word : allowed) word = 0;
    for (int32_t token = 0; token < kVocab; ++token) {
      if (allows(sum_, token)) allowed[static_cast<size_t>(token) / 32] |= 1u << token % 32;
    }
  }
  bool accept(int32_t token) override {
    if (!allows(sum_, token)) return false;
    tokens_.push_back(token);
    sum_ += token;
    return true;
  }
  void rollback(int32_t count) override {
    for (; count > 0; --count) {
      sum_ -= tokens_.at(tokens_.size() - 1);
      tokens_.pop_back();
    }
  }
  bool ended() const override { return tokens_.size() >= length_; }

 private:
  size_t length_;
  int64_t sum_ = 0;
  std::vector<int32_t> tokens_;
};

// Which fails at its n-th call.
class Failing final : public TokenConstraint {
 public:
  explicit Failing(int calls) : left_(calls) {}
  void fill(std::span<uint32_t> allowed) override {
    count();
    for (uint32_t& word : allowed) word = ~0u;
  }
  bool accept(int32_t) override { return count(); }
  void rollback(int32_t) override { count(); }
  bool ended() const override { return false; }

 private:
  bool count() {
    if (left_-- == 0) throw Error("[grammar] out of steps");
    return true;
  }
  int left_;
};

// What sampling by hand from masked rows gives.
std::vector<int32_t> expected_text(const Ask& ask, size_t length) {
  std::vector<int32_t> contents;
  for (const int32_t token : ask.prompt) contents.push_back(content(token, Phase::decode, true));
  Sums sums(length);
  Sampler sampler;
  std::vector<float> row(kVocab);
  std::vector<uint32_t> allowed((kVocab + 31) / 32);
  std::vector<int32_t> text;
  while (text.size() < static_cast<size_t>(ask.params.max_tokens) && !sums.ended()) {
    fill_logits(contents, row.data());
    sums.fill(allowed);
    for (int32_t token = 0; token < kVocab; ++token) {
      const bool allows = (allowed[static_cast<size_t>(token) / 32] >> token % 32 & 1) != 0;
      if (!allows) row[static_cast<size_t>(token)] = -std::numeric_limits<float>::infinity();
    }
    const int32_t token = sampler.sample(row, ask.params, ask.prompt, text, text.size()).token;
    sums.accept(token);
    text.push_back(token);
    contents.push_back(content(token, Phase::decode, true));
  }
  return text;
}

Setup setup_of(int32_t pages, bool drafts) {
  Setup setup;
  setup.one_arithmetic = true;
  setup.num_pages = pages;
  if (drafts) {
    setup.speculation.proposers = {recycling_proposer({.width = 3}), suffix_proposer()};
    setup.speculation.controller = fixed_controller(6);
  }
  return setup;
}

}  // namespace

TEST("constrained rows draw from what is allowed, whatever runs beside them") {
  std::vector<Ask> asks = ragged_requests(4, 12, 120);
  for (const bool drafts : {false, true}) {
    for (const int32_t pages : {5, 64}) {
      Harness harness(setup_of(pages, drafts));
      std::vector<RequestId> ids;
      for (size_t i = 0; i < asks.size(); ++i) {
        const bool constrained = i % 4 != 3;
        ids.push_back(harness.engine->add(asks[i].prompt, asks[i].params,
                                          constrained ? std::make_shared<Sums>(40) : nullptr));
      }
      harness.finish();
      for (size_t i = 0; i < asks.size(); ++i) {
        const bool constrained = i % 4 != 3;
        const std::vector<int32_t> expected = constrained
                                                  ? expected_text(asks[i], 40)
                                                  : reference(asks[i].prompt, asks[i].params, true);
        CHECK(harness.text(ids[i]) == expected);
        const bool ended = constrained && expected.size() == 40;
        CHECK(harness.outputs.at(ids[i]).finish ==
              (ended ? FinishReason::stop : FinishReason::length));
      }
    }
  }
}

TEST("logprobs are the model's own") {
  std::mt19937 random(5);
  Ask ask{random_prompt(random, 9), greedy(6)};
  ask.params.logprobs = 3;
  Harness harness(setup_of(64, false));
  const RequestId id = harness.engine->add(ask.prompt, ask.params, std::make_shared<Sums>(99));
  harness.finish();
  bool forbidden = false;
  int64_t sum = 0;
  for (const SampledToken& sampled : harness.outputs.at(id).tokens) {
    for (const TokenLogprob& likely : sampled.top) {
      forbidden = forbidden || !Sums::allows(sum, likely.token);
    }
    sum += sampled.token;
  }
  CHECK(forbidden);
}

TEST("a constraint that fails ends its request alone") {
  std::mt19937 random(6);
  const Ask other{random_prompt(random, 20), greedy(30)};
  for (const bool drafts : {false, true}) {
    for (int calls = 0; calls < 40; ++calls) {
      Harness harness(setup_of(64, drafts));
      const RequestId id = harness.engine->add(random_prompt(random, 20), greedy(60),
                                               std::make_shared<Failing>(calls));
      const RequestId beside = harness.engine->add(other.prompt, other.params);
      harness.finish();
      CHECK(harness.outputs.at(id).finish == FinishReason::error);
      CHECK_EQ(harness.outputs.at(id).error, "[grammar] out of steps");
      CHECK(harness.text(beside) == reference(other.prompt, other.params, true));
    }
  }
}

TEST("nothing allowed, and masks of another size, are refused") {
  Sampler sampler;
  const std::vector<float> row(70, 1.0f);
  const std::vector<uint32_t> none = {0, 0, 0xffffffc0};  // bits beyond the row
  CHECK_THROWS(InvalidArgument, "allowed: expected at least one token",
               sampler.sample(row, {}, {}, {}, 0, none));
  CHECK_THROWS(InvalidArgument, "allowed: expected 3 words, got 2",
               sampler.sample(row, {}, {}, {}, 0, std::span(none).first(2)));
  const std::vector<uint32_t> last = {0, 0, 1u << 5};
  CHECK_EQ(sampler.sample(row, {}, {}, {}, 0, last).token, 69);
  std::vector<float> probabilities(row.size());
  sampler.distribution(row, {}, {}, {}, probabilities, last);
  CHECK_EQ(probabilities[69], 1.0f);
}

CHECK_MAIN()
