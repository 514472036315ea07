// Samplers that look at the text or keep a state, in the engine: texts are those of sampling by
// hand, with drafts and without, in any batch, with pages for all or for few.
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "effinfer/speculative.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

namespace {

// Drafts the text that a request will have, a few tokens at a time, the last of them wrong.
class KnownTexts final : public Proposer {
 public:
  explicit KnownTexts(const std::vector<Ask>& asks) {
    for (const Ask& ask : asks) {
      std::vector<int32_t>& text = texts_[ask.params.seed];
      text = ask.prompt;
      const auto output = reference(ask.prompt, ask.params, true);
      text.insert(text.end(), output.begin(), output.end());
    }
  }
  std::string_view name() const override { return "known"; }
  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    for (size_t i = 0; i < views.size(); ++i) {
      const std::vector<int32_t>& text = texts_.at(views[i].params->seed);
      const size_t size = views[i].tokens.size();
      const int32_t count = std::min({views[i].max_nodes, views[i].max_depth, 1 + turn_++ % 5});
      for (int32_t n = 0; n < count; ++n) {
        const int32_t right = text.at(size + static_cast<size_t>(n));
        drafts[i].add(n == 4 ? (right + 1) % 90 : right, n - 1, 0.9f);
      }
    }
  }

 private:
  std::map<uint64_t, std::vector<int32_t>> texts_;
  int32_t turn_ = 0;
};

// A kind of sampler each, over few tokens so that texts repeat themselves.
std::vector<Ask> asks_of_each_kind() {
  std::mt19937 random(8);
  std::vector<Ask> asks;
  for (int32_t i = 0; i < 21; ++i) {
    SamplingParams params;
    params.seed = static_cast<uint64_t>(i) + 1;
    params.max_tokens = 60 + i;
    params.ignore_eos = true;
    for (int32_t token = 6; token < kVocab; ++token)
      params.logit_bias.emplace_back(token, -HUGE_VALF);
    switch (i % 7) {
      case 0:
        params.bad_words = {{1}, {2, 3}, {3, 2, 4}, {4, 4}};
        break;
      case 1:
        params.dry_multiplier = 1.5f;
        params.dry_sequence_breakers = {5};
        break;
      case 2:
        params.dry_multiplier = 4.0f;
        params.dry_penalty_last_n = 30;
        params.dry_allowed_length = 1;
        break;
      case 3:
        params.logit_bias.clear();
        params.top_n_sigma = 1.2f;
        params.top_k = 6;
        break;
      case 4:
        params.xtc_probability = 0.5f;
        params.xtc_threshold = 0.05f;
        params.top_k = 5;
        break;
      case 5:
        params.mirostat = 1 + i % 2;
        params.mirostat_tau = 1.0f;
        break;
      default:
        params.bad_words = {{0, 1}};
        params.repetition_penalty = 1.2f;
        params.frequency_penalty = 0.1f;
        params.dry_multiplier = 1.0f;
        params.xtc_probability = 0.3f;
    }
    asks.push_back({random_prompt(random, 1 + random() % 100), params});
  }
  return asks;
}

}  // namespace

TEST("texts of every sampler are those of sampling by hand") {
  const std::vector<Ask> asks = asks_of_each_kind();
  for (const bool drafts : {false, true}) {
    for (const int32_t pages : {5, 64}) {
      Setup setup;
      setup.one_arithmetic = true;
      setup.num_pages = pages;
      if (drafts) {
        setup.speculation.proposers = {std::make_shared<KnownTexts>(asks)};
        setup.speculation.controller = fixed_controller(6);
      }
      Harness harness(setup);
      check_texts(harness, asks, true);
      for (size_t i = 0; i < asks.size(); ++i) {
        const SpeculationMetrics metrics =
            harness.engine->metrics(static_cast<RequestId>(i) + 1).speculation;
        // With pages for few requests drafts may find no room.
        const bool may_draft = drafts && asks[i].params.mirostat == 0;
        if (!may_draft) CHECK_EQ(metrics.drafted, 0);
        if (may_draft && pages == 64) CHECK(metrics.accepted > 20);
      }
    }
  }
}

TEST("mirostat samples for itself, whatever the verifier") {
  // Which takes the token 7 whatever the row says.
  class Stubborn final : public Verifier {
   public:
    std::string_view name() const override { return "stubborn"; }
    Guarantee guarantee() const override { return Guarantee::lossy; }
    void verify(const Draft&, TokenRows& rows) override { rows.emit(0, rows.scored(0, 7)); }
  };
  Setup setup;
  setup.one_arithmetic = true;
  setup.speculation.verifier = std::make_shared<Stubborn>();
  Harness harness(setup);
  Ask ask = {{1, 2, 3}, greedy(20)};
  const RequestId plain = harness.engine->add(ask.prompt, ask.params);
  ask.params.temperature = 1.0f;
  ask.params.mirostat = 2;
  ask.params.mirostat_tau = 2.0f;
  check_texts(harness, {ask}, true);
  CHECK(harness.text(plain) == std::vector<int32_t>(20, 7));
}

TEST("rows that need all logits never come from the highest alone") {
  Setup setup;
  setup.one_arithmetic = true;
  for (int kind = 0; kind < 6; ++kind) {
    Harness harness(setup);
    SamplingParams params;
    params.top_k = 4;
    params.max_tokens = 10;
    if (kind == 1) params.bad_words = {{3}};
    if (kind == 2) params.dry_multiplier = 1.0f;
    if (kind == 3) params.top_n_sigma = 1.0f;
    if (kind == 4) params.xtc_probability = 0.5f;
    if (kind == 5) params.mirostat = 2;
    harness.engine->add(std::vector<int32_t>{1, 2, 3}, params);
    harness.finish();
    CHECK_EQ(harness.log.top_steps > 0, kind == 0);
    CHECK_EQ(Sampler::is_drawn_from_logits(params), kind == 0);  // nor from a device
  }
}

TEST("a request whose tokens are all bad words ends alone") {
  Harness harness({.one_arithmetic = true});
  SamplingParams params;
  params.max_tokens = 5;
  for (int32_t token = 0; token < kVocab; ++token) params.bad_words.push_back({token});
  const RequestId bad = harness.engine->add(std::vector<int32_t>{1, 2}, params);
  const Ask good = {{1, 2, 3}, greedy(5)};
  check_texts(harness, {good}, true);
  CHECK(harness.outputs.at(bad).finish == FinishReason::error);
  CHECK(harness.outputs.at(bad).error.find("finite maximum") != std::string::npos);
}

CHECK_MAIN()
