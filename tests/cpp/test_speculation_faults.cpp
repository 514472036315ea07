// Parts of speculation that fail or are used wrongly: texts stay, the requests concerned are told.
#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/speculative.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

namespace {

void fail_if(bool fails) {
  if (fails) throw std::runtime_error("out of order");
}

// Drafts what is likely wrong, and throws where it is told to from a number of calls on.
class FaultyProposer : public Proposer {
 public:
  explicit FaultyProposer(std::string where, int after = 3)
      : where_(std::move(where)), left_(after) {}
  std::string_view name() const override { return "faulty"; }
  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    ++asked;
    for (size_t i = 0; i < views.size(); ++i) drafts[i].add(1, -1, 0.5f);
    fail_if(where_ == "propose" && left_-- == 0);
  }
  void observe(std::span<const StepFacts>) override {
    fail_if(where_ == "observe" && left_-- == 0);
  }
  void forget(RequestId) override { fail_if(where_ == "forget"); }
  int asked = 0;

 private:
  std::string where_;
  int left_;
};

class FaultyController : public DraftController {
 public:
  explicit FaultyController(std::string where) : where_(std::move(where)) {}
  std::string_view name() const override { return "faulty"; }
  int32_t budget(const DraftView&) override {
    ++asked;
    fail_if(where_ == "budget" && asked >= 4);
    return 4;
  }
  void choose(std::span<const DraftView>, std::span<const Draft>, const StepBudget&,
              std::span<uint64_t> keep) override {
    std::fill(keep.begin(), keep.end(), 1);
    fail_if(where_ == "choose");
  }
  void observe(const StepCost&, std::span<const StepFacts>) override {
    fail_if(where_ == "observe");
  }
  void forget(RequestId) override { fail_if(where_ == "forget"); }
  int asked = 0;

 private:
  std::string where_;
};

// Of what ran in a harness: requests that were warned, and refused drafts of all.
std::pair<int, int64_t> told(const Harness& harness) {
  int warned = 0;
  int64_t refused = 0;
  for (const auto& [id, output] : harness.outputs) {
    const int64_t count = harness.engine->metrics(id).speculation.refused_drafts;
    CHECK_EQ(count > 0, !output.warning.empty());
    warned += output.warning.empty() ? 0 : 1;
    refused += count;
  }
  return {warned, refused};
}

std::vector<Ask> long_requests(int count) {
  std::vector<Ask> asks = ragged_requests(3, count, 30);
  for (size_t i = 0; i < asks.size(); ++i) {
    asks[i].params.max_tokens = 30 + 9 * static_cast<int32_t>(i);
  }
  return asks;
}

// Verifies as match does, and then emits a token of its own choice for one request.
class RogueVerifier : public Verifier {
 public:
  RogueVerifier(RequestId victim, int32_t token) : victim_(victim), token_(token) {}
  std::string_view name() const override { return "rogue"; }
  Guarantee guarantee() const override { return Guarantee::lossy; }
  void verify(const Draft&, TokenRows& rows) override {
    if (rows.request() == victim_) {
      rows.emit(0, {token_, 0.0f, {}});
    } else {
      rows.emit(0, rows.sample(0));
    }
  }

 private:
  RequestId victim_;
  int32_t token_;
};

}  // namespace

TEST("a proposer that throws where no request is to blame is told of once and not asked again") {
  for (const char* where : {"observe", "forget"}) {
    const auto proposer = std::make_shared<FaultyProposer>(where);
    Setup setup;
    setup.max_batch_tokens = 200;
    setup.speculation = {{proposer, suffix_proposer()}, nullptr, fixed_controller(4)};
    Harness harness(setup);
    const std::vector<Ask> asks = long_requests(5);
    check_texts(harness, asks, false);
    const auto [warned, refused] = told(harness);
    CHECK(warned > 0);
    CHECK_EQ(warned, refused);  // one draft each
    CHECK(proposer->asked < harness.log.steps);
    const int asked = proposer->asked;
    harness.outputs.clear();
    check_texts(harness, asks, false);  // nobody is told again
    CHECK_EQ(proposer->asked, asked);
    CHECK_EQ(told(harness).first, 0);
  }
}

TEST("a proposer that throws in propose() leaves that step plain and is asked again") {
  const auto proposer = std::make_shared<FaultyProposer>("propose");
  Setup setup;
  setup.max_batch_tokens = 200;
  setup.speculation = {{proposer}, nullptr, fixed_controller(4)};
  Harness harness(setup);
  check_texts(harness, long_requests(5), false);
  const auto [warned, refused] = told(harness);
  CHECK(warned > 0);
  CHECK_EQ(warned, refused);
  CHECK(proposer->asked > 20);
}

TEST("a controller that throws anywhere ends drafting, and the requests of a step are told") {
  for (const char* where : {"budget", "choose", "observe", "forget"}) {
    const auto controller = std::make_shared<FaultyController>(where);
    Setup setup;
    setup.max_batch_tokens = 200;
    setup.speculation = {{suffix_proposer(), prompt_lookup_proposer()}, nullptr, controller};
    Harness harness(setup);
    const std::vector<Ask> asks = long_requests(5);
    check_texts(harness, asks, false);
    const auto [warned, refused] = told(harness);
    CHECK(warned > 0);
    CHECK_EQ(warned, refused);
    const int asked = controller->asked;
    harness.outputs.clear();
    check_texts(harness, asks, false);
    CHECK_EQ(controller->asked, asked);
    CHECK_EQ(told(harness).first, 0);
  }
}

TEST("drafts of several proposers together keep to the context's end and to the budget") {
  // Each fills its own part of the vocabulary below the root.
  class Star : public Proposer {
   public:
    explicit Star(int32_t first) : first_(first) {}
    std::string_view name() const override { return "star"; }
    void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
      for (size_t i = 0; i < views.size(); ++i) {
        for (int32_t n = 0; n < std::min(views[i].max_nodes, 30); ++n) {
          drafts[i].add(first_ + n, -1, 0.5f);
        }
      }
    }
    void observe(std::span<const StepFacts> facts) override {
      for (const StepFacts& fact : facts) {
        if (fact.proposed == nullptr || fact.proposed->tokens.empty()) continue;
        const size_t before = fact.tokens.size() - fact.num_emitted;
        CHECK(before + fact.proposed->tokens.size() <= 100);
        largest = std::max(largest, fact.proposed->tokens.size());
      }
    }
    size_t largest = 0;

   private:
    int32_t first_;
  };
  const auto star = std::make_shared<Star>(0);
  Setup setup;
  setup.max_seq_len = 100;
  setup.max_batch_tokens = 200;
  setup.speculation = {{star, std::make_shared<Star>(30), std::make_shared<Star>(60)},
                       nullptr,
                       fixed_controller(63)};
  Harness harness(setup);
  SamplingParams params = greedy(std::numeric_limits<int32_t>::max());
  const RequestId id = harness.engine->add(std::vector<int32_t>(20, 5), params);
  harness.finish();
  params.max_tokens = 80;
  CHECK(harness.text(id) == reference(std::vector<int32_t>(20, 5), params, false));
  CHECK_EQ(star->largest, size_t{63});
  CHECK_EQ(told(harness).first, 0);
}

TEST("native proposers take memory for the context, not for max_tokens") {
  Setup setup;
  setup.max_seq_len = 120;
  setup.max_batch_tokens = 200;
  setup.speculation = {{suffix_proposer(), prompt_lookup_proposer(), recycling_proposer()},
                       nullptr,
                       fixed_controller(6)};
  Harness harness(setup);
  const std::vector<int32_t> prompt = {1, 2, 3, 1, 2, 3, 1, 2};
  SamplingParams params = greedy(std::numeric_limits<int32_t>::max());
  const RequestId id = harness.engine->add(prompt, params);
  harness.finish();
  CHECK_EQ(harness.text(id).size(), size_t{112});
  CHECK_EQ(told(harness).first, 0);  // a std::bad_alloc would be a refused draft
}

TEST("a part belongs to one engine at a time, and a proposer may go on in the next") {
  Setup setup;
  setup.max_batch_tokens = 200;
  setup.speculation = {
      {suffix_proposer(), prompt_lookup_proposer()}, match_verifier(), fixed_controller(4)};
  std::vector<Ask> asks = long_requests(2);
  asks[0].prompt.assign(90, 7);
  {
    Harness first(setup);
    CHECK_THROWS(InvalidArgument, "is in use", Harness second(setup));
    Setup twice = setup;
    const auto proposer = suffix_proposer();
    twice.speculation = {{proposer, proposer}, nullptr, nullptr};
    CHECK_THROWS(InvalidArgument, "is in use", Harness second(twice));
    // It ends with requests half done, and the next engine gives their numbers to shorter texts.
    for (const Ask& ask : asks) first.engine->add(ask.prompt, ask.params);
    for (int i = 0; i < 20; ++i) first.step();
  }
  Harness next(setup);
  check_texts(next, long_requests(5), false);
  CHECK_EQ(told(next).first, 0);
}

TEST("a verifier that emits no token of the vocabulary ends that request alone") {
  for (const int32_t token : {-1, kVocab, std::numeric_limits<int32_t>::max()}) {
    Setup setup;
    setup.max_batch_tokens = 200;
    setup.speculation = {
        {recycling_proposer()}, std::make_shared<RogueVerifier>(2, token), nullptr};
    Harness harness(setup);
    const std::vector<Ask> asks = long_requests(3);
    for (const Ask& ask : asks) harness.engine->add(ask.prompt, ask.params);
    harness.finish();
    CHECK(harness.outputs.at(2).finish == FinishReason::error);
    CHECK(harness.outputs.at(2).error.find("emitted token") != std::string::npos);
    for (const size_t i : {size_t{0}, size_t{2}}) {
      const auto id = static_cast<RequestId>(i) + 1;
      CHECK(harness.text(id) == reference(asks[i].prompt, asks[i].params, false));
    }
  }
}

TEST("a token that was not drawn has the log-probability of its row") {
  const auto replay = std::make_shared<ReplayVerifier>();
  Setup setup;
  setup.speculation = {{suffix_proposer()}, replay, nullptr};
  Harness harness(setup);
  SamplingParams params = greedy(6);
  params.logprobs = 2;
  const std::vector<int32_t> prompt = {4, 5, 6};
  const RequestId id = harness.engine->add(prompt, params);
  const std::vector<int32_t> text = {10, 11, 12, 13, 14, 15};
  replay->set(id, text);
  harness.finish();
  CHECK(harness.text(id) == text);
  for (const SampledToken& sampled : harness.outputs.at(id).tokens) {
    CHECK_EQ(sampled.top.size(), size_t{2});
    CHECK(sampled.logprob <= sampled.top[0].logprob);
    CHECK(sampled.logprob < 0.0f);
    // The model would have written another token.
    CHECK(sampled.top[0].token != sampled.token);
  }
}

TEST("requests come and go from other threads while drafts are verified") {
  Setup setup;
  setup.max_batch_tokens = 64;
  setup.num_pages = 24;
  SuffixOptions options;
  options.shared_tokens = 1000;
  setup.speculation = {
      {suffix_proposer(options), recycling_proposer()}, nullptr, fixed_controller(5)};
  Harness harness(setup);
  const std::vector<Ask> asks = long_requests(6);
  check_callers(harness, asks, 200, false, [&](RequestId id) {
    CHECK(harness.engine->metrics(id).speculation.accepted >= 0);
  });
}

CHECK_MAIN()
