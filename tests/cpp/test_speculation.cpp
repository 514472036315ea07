// Speculation in the engine over a fake model: whatever is drafted, texts are plain decoding's.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "effinfer/speculative.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

namespace {

// Drafts random trees in which the text's own continuation is hidden: shuffled siblings,
// duplicates, wrong tokens, ends too early. It knows the texts by their prompts.
class OracleProposer : public Proposer {
 public:
  OracleProposer(std::vector<Ask> asks, bool one_arithmetic, uint32_t seed) : random_(seed) {
    for (const Ask& ask : asks) {
      std::vector<int32_t> text = ask.prompt;
      const auto output = reference(ask.prompt, ask.params, one_arithmetic);
      text.insert(text.end(), output.begin(), output.end());
      texts_.emplace(std::pair(ask.prompt, ask.params.seed), text);
    }
  }

  std::string_view name() const override { return "oracle"; }
  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    for (size_t i = 0; i < views.size(); ++i) {
      const DraftView& view = views[i];
      const std::vector<int32_t> prompt(
          view.tokens.begin(), view.tokens.begin() + static_cast<ptrdiff_t>(view.prompt_size));
      const std::vector<int32_t>& text = texts_.at({prompt, view.params->seed});
      CHECK(view.tokens.size() <= text.size());
      CHECK(std::equal(view.tokens.begin(), view.tokens.end(), text.begin()));
      draft(view, text, drafts[i]);
    }
  }
  void observe(std::span<const StepFacts> facts) override {
    for (const StepFacts& fact : facts) {
      CHECK(fact.num_emitted == fact.accepted.size() + 1);
      accepted += static_cast<int64_t>(fact.accepted.size());
    }
  }
  void forget(RequestId) override { ++forgotten; }

  int64_t accepted = 0;
  int forgotten = 0;

 private:
  void draft(const DraftView& view, const std::vector<int32_t>& text, Draft& draft) {
    std::vector<size_t> depths;
    const auto nodes = static_cast<int32_t>(random_() % static_cast<uint32_t>(view.max_nodes + 1));
    std::vector<int32_t> path = {-1};  // nodes of the text itself
    for (int32_t n = 0; n < nodes; ++n) {
      const bool right = random_() % 3 != 0;
      const int32_t parent =
          right ? path.back() : static_cast<int32_t>(random_() % static_cast<uint32_t>(n + 1)) - 1;
      const size_t depth = parent < 0 ? 1 : depths[static_cast<size_t>(parent)] + 1;
      const size_t at = view.tokens.size() + depth - 1;
      // Beyond the depth that is asked for, too: the engine leaves that out.
      int32_t token = static_cast<int32_t>(random_() % 95);
      if (right && at < text.size()) token = text[at];
      draft.add(token, parent, static_cast<float>(random_() % 1000) / 1000.0f);
      depths.push_back(depth);
      if (right) path.push_back(n);
    }
  }

  std::map<std::pair<std::vector<int32_t>, uint64_t>, std::vector<int32_t>> texts_;
  std::mt19937 random_;
};

// Keeps random nodes, not always with their parents.
class RandomController : public DraftController {
 public:
  explicit RandomController(uint32_t seed) : random_(seed) {}
  std::string_view name() const override { return "random"; }
  int32_t budget(const DraftView&) override {
    return static_cast<int32_t>(random_() % (Draft::kMostNodes + 1));
  }
  void choose(std::span<const DraftView>, std::span<const Draft>, const StepBudget&,
              std::span<uint64_t> keep) override {
    for (uint64_t& word : keep) {
      word = uint64_t{random_()} << 32 | random_();
      if (random_() % 2 == 0) word = ~uint64_t{0};
    }
  }
  void observe(const StepCost&, std::span<const StepFacts>) override {}

 private:
  std::mt19937 random_;
};

// A proposer of one function.
class FunctionProposer : public Proposer {
 public:
  explicit FunctionProposer(std::function<void(const DraftView&, Draft&)> body)
      : body_(std::move(body)) {}
  std::string_view name() const override { return "function"; }
  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    for (size_t i = 0; i < views.size(); ++i) body_(views[i], drafts[i]);
  }

 private:
  std::function<void(const DraftView&, Draft&)> body_;
};

Speculation with(std::shared_ptr<Proposer> proposer,
                 std::shared_ptr<DraftController> controller = nullptr) {
  return {{std::move(proposer)}, nullptr, std::move(controller)};
}

int64_t total(Harness& harness, const std::vector<RequestId>& ids,
              int64_t SpeculationMetrics::* field) {
  int64_t sum = 0;
  for (const RequestId id : ids) sum += harness.engine->metrics(id).speculation.*field;
  return sum;
}

std::vector<RequestId> ids_of(const Harness& harness) {
  std::vector<RequestId> ids;
  for (const auto& [id, output] : harness.outputs) ids.push_back(id);
  return ids;
}

}  // namespace

TEST("random trees leave every text as it is, whatever the batch, the pages and the phases") {
  for (const bool one_arithmetic : {false, true}) {
    int64_t accepted = 0;
    int trees = 0;
    for (uint32_t seed = 0; seed < 24; ++seed) {
      const std::vector<Ask> asks = ragged_requests(seed, 1 + static_cast<int>(seed % 8), 150);
      Setup setup;
      setup.one_arithmetic = one_arithmetic;
      setup.num_pages = seed % 2 == 0 ? 64 : 6;  // preemption
      setup.max_batch_tokens = seed % 3 == 0 ? 9 : 100;
      const auto oracle = std::make_shared<OracleProposer>(asks, one_arithmetic, seed);
      setup.speculation = with(oracle, std::make_shared<RandomController>(seed));
      Harness harness(setup);
      check_texts(harness, asks, one_arithmetic);
      CHECK_EQ(total(harness, ids_of(harness), &SpeculationMetrics::accepted), oracle->accepted);
      CHECK_EQ(total(harness, ids_of(harness), &SpeculationMetrics::refused_drafts), 0);
      CHECK_EQ(oracle->forgotten, static_cast<int>(asks.size()));
      accepted += oracle->accepted;
      trees += harness.log.tree_rows;
    }
    CHECK(accepted > 1000);
    CHECK(trees > 1000);
  }
}

TEST("the native proposers and the cost controller leave every text as it is") {
  for (const bool one_arithmetic : {false, true}) {
    for (uint32_t seed = 0; seed < 6; ++seed) {
      std::vector<Ask> asks = ragged_requests(seed, 5, 60);
      asks.push_back(asks[0]);
      asks.push_back(asks[0]);
      Setup setup;
      setup.one_arithmetic = one_arithmetic;
      setup.max_batch_tokens = 64;
      SuffixOptions options;
      options.shared_tokens = 1000;
      options.beside = seed % 3 == 0;
      options.corpus = reference(asks[1].prompt, asks[1].params, one_arithmetic);
      setup.speculation.proposers = {suffix_proposer(options), prompt_lookup_proposer(),
                                     recycling_proposer(), recycling_proposer({4, 100, 0.5f}),
                                     lookahead_proposer()};
      if (seed % 2 == 0) setup.speculation.controller = fixed_controller(20);
      Harness harness(setup);
      check_texts(harness, asks, one_arithmetic);
      if (seed % 2 != 0) continue;
      CHECK(total(harness, ids_of(harness), &SpeculationMetrics::accepted) >
            asks[1].params.max_tokens);
    }
  }
}

TEST("texts with end tokens, stops and a full context end where plain decoding ends") {
  std::vector<Ask> asks = ragged_requests(5, 6, 100);
  for (Ask& ask : asks) {
    ask.params.ignore_eos = false;
    ask.params.max_tokens = 400;
    const auto plain = reference(ask.prompt, ask.params, false);
    ask.params.stop_token_ids = {plain[plain.size() / 4]};
  }
  asks[0].params.stop_token_ids.clear();
  Setup plain_setup;
  plain_setup.eos = {17};
  plain_setup.max_batch_tokens = 80;
  plain_setup.max_seq_len = 300;
  Setup drafted = plain_setup;
  drafted.speculation =
      with(std::make_shared<OracleProposer>(asks, false, 3), std::make_shared<RandomController>(4));
  Harness a(plain_setup);
  Harness b(drafted);
  for (const Ask& ask : asks) {
    a.engine->add(ask.prompt, ask.params);
    b.engine->add(ask.prompt, ask.params);
  }
  a.finish();
  b.finish();
  for (const RequestId id : ids_of(a)) {
    CHECK(a.text(id) == b.text(id));
    CHECK(a.outputs.at(id).finish == b.outputs.at(id).finish);
    CHECK_EQ(a.engine->metrics(id).output_tokens, b.engine->metrics(id).output_tokens);
  }
  CHECK(b.log.steps < a.log.steps);
}

TEST("a wrong draft costs its request the draft and one warning, others nothing") {
  const std::vector<std::function<void(const DraftView&, Draft&)>> wrongs = {
      [](const DraftView&, Draft& d) { d.add(kVocab, -1, 0.5f); },
      [](const DraftView&, Draft& d) { d.add(-1, -1, 0.5f); },
      [](const DraftView&, Draft& d) { d.add(1, 0, 0.5f); },
      [](const DraftView&, Draft& d) { d.add(1, -2, 0.5f); },
      [](const DraftView&, Draft& d) { d.add(1, -1, __builtin_nanf("")); },
      [](const DraftView&, Draft& d) { d.add(1, -1, 1.5f); },
      [](const DraftView&, Draft& d) { d.tokens.push_back(1); },
      [](const DraftView&, Draft& d) {
        for (int i = 0; i < 100; ++i) d.add(1, -1, 0.5f);
      },
      [](const DraftView&, Draft&) { throw std::runtime_error("no idea"); },
  };
  for (const auto& wrong : wrongs) {
    const std::vector<Ask> asks = ragged_requests(2, 4, 30);
    Setup setup;
    RequestId victim = 2;
    const auto proposer = std::make_shared<FunctionProposer>([&](const DraftView& v, Draft& d) {
      if (v.request == victim) wrong(v, d);
    });
    setup.speculation = {
        {proposer, std::make_shared<OracleProposer>(asks, false, 1)}, nullptr, fixed_controller(8)};
    setup.max_batch_tokens = 64;
    Harness harness(setup);
    check_texts(harness, asks, false);
    CHECK(harness.engine->metrics(victim).speculation.refused_drafts > 0);
    CHECK(!harness.outputs.at(victim).warning.empty());
    const bool throws = &wrong == &wrongs.back();
    for (const RequestId id : ids_of(harness)) {
      if (id == victim || throws) continue;
      CHECK_EQ(harness.engine->metrics(id).speculation.refused_drafts, 0);
      CHECK(harness.outputs.at(id).warning.empty());
    }
  }
}

TEST("a draft that breaks the step is dropped, and one that yields no number is not followed") {
  for (const int32_t bad : {kExplosive, kPoison}) {
    const std::vector<Ask> asks = ragged_requests(2, 4, 30);
    Setup setup;
    setup.max_batch_tokens = 64;
    setup.speculation = with(std::make_shared<FunctionProposer>(
                                 [bad](const DraftView&, Draft& d) { d.add(bad, -1, 0.5f); }),
                             fixed_controller(8));
    Harness harness(setup);
    check_texts(harness, asks, false);
    CHECK(total(harness, ids_of(harness), &SpeculationMetrics::accepted) == 0);
  }
}

TEST("drafts take free pages only: nobody is preempted and no prefix evicted for them") {
  const std::vector<Ask> asks = ragged_requests(8, 6, 120);
  for (const int32_t pages : {6, 9, 14}) {
    Setup plain_setup;
    plain_setup.num_pages = pages;
    plain_setup.max_batch_tokens = 100;
    Setup drafted = plain_setup;
    drafted.speculation =
        with(std::make_shared<FunctionProposer>([](const DraftView& view, Draft& d) {
               for (int i = 0; i < view.max_nodes; ++i) d.add(kPoison, -1, 0.5f);
             }),
             fixed_controller(63));
    Harness a(plain_setup);
    Harness b(drafted);
    check_texts(a, asks, false);
    check_texts(b, asks, false);
    CHECK_EQ(a.engine->stats().preemptions, b.engine->stats().preemptions);
    CHECK_EQ(a.engine->cache().cached_prefix_pages(), b.engine->cache().cached_prefix_pages());
    CHECK_EQ(a.log.steps, b.log.steps);
  }
}

TEST("requests may decline, and cancellation in the middle leaves nothing behind") {
  std::vector<Ask> asks = ragged_requests(4, 4, 40);
  for (Ask& ask : asks) ask.params.max_tokens = 60;
  asks[1].params.speculation = false;
  Setup setup;
  setup.max_batch_tokens = 64;
  setup.speculation = with(std::make_shared<OracleProposer>(asks, false, 9), fixed_controller(10));
  Harness harness(setup);
  std::vector<RequestId> ids;
  for (const Ask& ask : asks) ids.push_back(harness.engine->add(ask.prompt, ask.params));
  for (int i = 0; i < 8; ++i) harness.step();
  harness.engine->cancel(ids[2]);
  harness.finish();
  CHECK_EQ(harness.engine->metrics(ids[1]).speculation.drafted, 0);
  CHECK(harness.outputs.at(ids[2]).finish == FinishReason::cancelled);
  for (const size_t i : {size_t{0}, size_t{1}, size_t{3}}) {
    CHECK(harness.text(ids[i]) == reference(asks[i].prompt, asks[i].params, false));
  }
}

TEST("a replayed text is emitted as given, then the model's own") {
  const std::vector<Ask> asks = ragged_requests(1, 1, 20);
  const auto replay = std::make_shared<ReplayVerifier>();
  Setup setup;
  setup.speculation.verifier = replay;
  setup.speculation.proposers = {suffix_proposer()};
  Harness harness(setup);
  SamplingParams params = greedy(40);
  std::vector<int32_t> text;
  for (int i = 0; i < 30; ++i) text.push_back(i % 7);
  const RequestId id = harness.engine->add(asks[0].prompt, params);
  replay->set(id, text);
  harness.finish();
  const std::vector<int32_t> got = harness.text(id);
  CHECK_EQ(got.size(), size_t{40});
  CHECK(std::equal(text.begin(), text.end(), got.begin()));
}

CHECK_MAIN()
