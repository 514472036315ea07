// Drafts of a device of their own, over the fake model: whatever they are and whenever they come,
// texts are plain decoding's.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "engine_harness.h"
#include "runtime/speculative/draft_ahead.h"

using namespace effinfer;
using namespace fake;
using runtime::AheadText;
using runtime::DraftAhead;
using std::chrono::microseconds;
using std::chrono::milliseconds;

namespace {

// What tests look at while the runner runs.
struct Runs {
  std::atomic<int> levels{0};
  std::atomic<int> cancelled{0};
  std::atomic<int> endless{0};  // levels that nobody cancelled in time
  std::atomic<int> overfull{0};
  std::atomic<int> open{0};
};

struct Plan {
  double right = 1.0;            // share of guesses that are the fake model's
  microseconds kernel{0};        // of which a level has ten
  bool blocks_wrong = false;     // a level behind a wrong guess lasts until it is cancelled
  int fails_at = -1;             // the level that throws
  bool fails_cancelled = false;  // a level that is cancelled throws something else
  RequestId refuses = -1;
};

// Guesses what the fake model says, or something else, and checks that it is told what it may be.
class Runner final : public runtime::DraftRunner {
 public:
  Runner(const Plan& plan, std::shared_ptr<Runs> runs) : plan_(plan), runs_(std::move(runs)) {}
  int64_t most_texts() const override { return 3; }
  int64_t max_seq_len() const override { return 390; }

  void run(std::span<AheadText> texts, const CancelToken& cancel) override {
    runs_->overfull += texts.empty() || texts.size() > 3;
    if (runs_->levels++ == plan_.fails_at) throw std::runtime_error("the device is gone");
    bool blocks = false;
    for (AheadText& text : texts) {
      open_.insert(text.request);
      blocks = blocks || (plan_.blocks_wrong && is_wrong(text.tokens));
    }
    runs_->open = static_cast<int>(open_.size());
    work(blocks, cancel);
    for (AheadText& text : texts) {
      if (text.request == plan_.refuses) {
        text.refusal = "no thanks";
        continue;
      }
      const int32_t token = next(text.tokens);
      const bool right = std::uniform_real_distribution<>()(random_) < plan_.right;
      const int32_t guess = right ? token : (token + 1) % 90;
      text.likely = {{guess, 0.8f}, {(token + 2) % 90, 0.1f}};
    }
  }
  void release(RequestId request) override {
    open_.erase(request);
    runs_->open = static_cast<int>(open_.size());
  }

 private:
  static int32_t next(const std::vector<int32_t>& tokens) {
    std::vector<int32_t> contents;
    for (const int32_t token : tokens) contents.push_back(content(token, Phase::decode, true));
    std::vector<float> row(kVocab);
    fill_logits(contents, row.data());
    return static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
  }
  // Whether the last token is a guess that the fake model would not make.
  static bool is_wrong(const std::vector<int32_t>& tokens) {
    if (tokens.size() < 2) return false;
    const std::vector<int32_t> before(tokens.begin(), tokens.end() - 1);
    return (next(before) + 1) % 90 == tokens.back();
  }
  void work(bool blocks, const CancelToken& cancel) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    try {
      for (int kernel = 0; kernel < 10 || blocks; ++kernel) {
        if (plan_.kernel.count() > 0 || blocks) std::this_thread::sleep_for(plan_.kernel);
        cancel.check();
        if (std::chrono::steady_clock::now() < end) continue;
        ++runs_->endless;
        return;
      }
    } catch (const Cancelled&) {
      ++runs_->cancelled;
      if (plan_.fails_cancelled) throw std::runtime_error("the device is gone");
      throw;
    }
  }

  const Plan plan_;
  const std::shared_ptr<Runs> runs_;
  std::mt19937 random_{3};
  std::set<RequestId> open_;
};

// Gives every node a row, and the drafter time: a step of the fake model takes none.
class PatientController final : public DraftController {
 public:
  PatientController(std::shared_ptr<Runs> runs, int levels, milliseconds most)
      : runs_(std::move(runs)), levels_(levels), most_(most) {}
  std::string_view name() const override { return "patient"; }
  int32_t budget(const DraftView&) override {
    const auto end = std::chrono::steady_clock::now() + most_;
    while (runs_->levels < seen_ + levels_ && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(microseconds(50));
    }
    seen_ = runs_->levels;
    return 12;
  }
  void choose(std::span<const DraftView>, std::span<const Draft> drafts, const StepBudget&,
              std::span<uint64_t> keep) override {
    for (size_t i = 0; i < drafts.size(); ++i) keep[i] = (uint64_t{1} << drafts[i].size()) - 1;
  }
  void observe(const StepCost&, std::span<const StepFacts>) override {}

 private:
  const std::shared_ptr<Runs> runs_;
  const int levels_;
  const milliseconds most_;
  int seen_ = 0;
};

struct Ahead {
  explicit Ahead(const Plan& plan, runtime::AheadOptions options = {}, int levels = 2,
                 milliseconds patience = milliseconds(3))
      : runs(std::make_shared<Runs>()) {
    const std::vector<int> cores = usable_cores();
    drafts = std::make_shared<DraftAhead>(options, Placement{{}, {cores.back()}});
    drafts->set_runner(std::make_unique<Runner>(plan, runs));
    setup.one_arithmetic = true;
    setup.max_batch_tokens = 200;
    setup.speculation = {
        {drafts}, nullptr, std::make_shared<PatientController>(runs, levels, patience)};
  }
  // Waits until the runner has forgotten all requests.
  void check_released() const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (runs->open > 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    CHECK_EQ(runs->open.load(), 0);
    CHECK_EQ(runs->overfull.load(), 0);
    CHECK_EQ(runs->endless.load(), 0);
  }
  std::shared_ptr<Runs> runs;
  std::shared_ptr<DraftAhead> drafts;
  Setup setup;
};

int64_t accepted(const Harness& harness) {
  int64_t sum = 0;
  for (const auto& [id, output] : harness.outputs) {
    sum += harness.engine->metrics(id).speculation.accepted;
  }
  return sum;
}

int warnings(const Harness& harness, const std::string& part) {
  int count = 0;
  for (const auto& [id, output] : harness.outputs) {
    count += output.warning.find(part) != std::string::npos ? 1 : 0;
  }
  return count;
}

}  // namespace

TEST("texts are plain decoding's whatever is drafted ahead and whenever it comes") {
  for (const double right : {1.0, 0.7, 0.0}) {
    for (const int late : {0, 200}) {
      for (const int32_t width : {1, 2}) {
        runtime::AheadOptions options;
        options.width = width;
        options.adaptive = right > 0.5;
        Plan plan;
        plan.right = right;
        plan.kernel = microseconds(late);
        Ahead ahead(plan, options);
        {
          Harness harness(ahead.setup);
          check_texts(harness, ragged_requests(7, 5, 40), true);
          CHECK_EQ(warnings(harness, "draft"), 0);
          if (right > 0.5 && late == 0) CHECK(accepted(harness) > 20);
        }
        ahead.check_released();
        CHECK(ahead.drafts->drafting()->levels > 10);
      }
    }
  }
}

TEST("a draft that is right is gone on with past what is verified") {
  runtime::AheadOptions options;
  options.length = 4;
  Ahead ahead({}, options, 5, milliseconds(200));
  Harness harness(ahead.setup);
  const std::vector<int32_t> prompt(20, 5);
  const RequestId id = harness.engine->add(prompt, greedy(120));
  harness.finish();
  CHECK(harness.text(id) == reference(prompt, greedy(120), true));
  const SpeculationMetrics metrics = harness.engine->metrics(id).speculation;
  // Four of each step's five tokens: nothing is drafted again behind a draft that came true.
  CHECK(metrics.accepted >= 80);
  CHECK_EQ(metrics.accepted, metrics.drafted);
  CHECK_EQ(ahead.runs->cancelled.load(), 0);
  CHECK(ahead.runs->levels <= 130);
}

TEST("what is drafted behind a wrong guess is cancelled while it runs") {
  Plan plan;
  plan.right = 0.0;
  plan.blocks_wrong = true;
  runtime::AheadOptions options;
  options.adaptive = false;
  Ahead ahead(plan, options, 2, milliseconds(5));
  {
    Harness harness(ahead.setup);
    const RequestId id = harness.engine->add(std::vector<int32_t>(10, 3), greedy(40));
    harness.finish();
    CHECK(harness.text(id) == reference(std::vector<int32_t>(10, 3), greedy(40), true));
    CHECK_EQ(accepted(harness), 0);
  }
  CHECK(ahead.runs->cancelled > 10);
  ahead.check_released();
}

TEST("a device that fails ends the drafts, and is told of once") {
  for (const int at : {0, 6}) {
    Plan plan;
    plan.fails_at = at;
    Ahead ahead(plan);
    Harness harness(ahead.setup);
    std::vector<Ask> asks = ragged_requests(3, 4, 30);
    for (Ask& ask : asks) ask.params.max_tokens += 30;
    check_texts(harness, asks, true);
    CHECK(warnings(harness, "draft_model on cpu:") > 0);
    CHECK_EQ(warnings(harness, "the device is gone; it is not asked again"),
             warnings(harness, "draft_model on cpu:"));
    const int levels = ahead.runs->levels;
    CHECK_EQ(levels, at + 1);
    harness.outputs.clear();
    check_texts(harness, asks, true);
    CHECK_EQ(warnings(harness, "draft"), 0);
    CHECK_EQ(ahead.runs->levels.load(), levels);
  }
}

// The job that follows the cancelled one is queued when that one fails.
TEST("a device that fails while it is cancelled is not asked again") {
  Plan plan;
  plan.right = 0.5;
  plan.blocks_wrong = true;
  plan.fails_cancelled = true;
  Ahead ahead(plan);
  Harness harness(ahead.setup);
  std::vector<Ask> asks = ragged_requests(3, 4, 30);
  for (Ask& ask : asks) ask.params.max_tokens += 30;
  check_texts(harness, asks, true);
  CHECK(warnings(harness, "the device is gone; it is not asked again") > 0);
  CHECK_EQ(ahead.runs->cancelled.load(), 1);
}

TEST("a request that the runner refuses is told once and goes on without drafts") {
  Plan plan;
  plan.refuses = 2;
  Ahead ahead(plan);
  {
    Harness harness(ahead.setup);
    std::vector<Ask> asks = ragged_requests(3, 3, 30);
    for (Ask& ask : asks) ask.params.max_tokens = 60;
    check_texts(harness, asks, true);
    CHECK_EQ(warnings(harness, "no thanks; the request goes on without its drafts"), 1);
    CHECK(!harness.outputs.at(2).warning.empty());
    CHECK_EQ(harness.engine->metrics(2).speculation.drafted, 0);
    CHECK(accepted(harness) > 10);
  }
  ahead.check_released();
}

TEST("nothing is drafted before a request's first token") {
  Ahead ahead({});
  ahead.setup.max_batch_tokens = 16;
  Harness harness(ahead.setup);
  harness.engine->add(std::vector<int32_t>(100, 4), greedy(30));
  while (harness.outputs.empty() || harness.outputs.begin()->second.tokens.empty()) {
    CHECK_EQ(ahead.runs->levels.load(), 0);
    harness.step();
  }
  CHECK_EQ(ahead.runs->levels.load(), 0);
  harness.finish();
  CHECK(ahead.runs->levels > 0);
}

TEST("requests come and go from other threads while drafts are made ahead") {
  Plan plan;
  plan.right = 0.8;
  plan.kernel = microseconds(1);
  Ahead ahead(plan, {}, 1, milliseconds(1));
  {
    Harness harness(ahead.setup);
    const std::vector<Ask> asks = ragged_requests(11, 6, 30);
    check_callers(harness, asks, 100, true,
                  [&](RequestId) { CHECK(ahead.drafts->drafting()->late >= 0); });
    // Requests that are half done when the engine goes.
    for (const Ask& ask : asks) harness.engine->add(ask.prompt, ask.params);
    for (int i = 0; i < 5; ++i) harness.step();
  }
  CHECK_EQ(ahead.runs->overfull.load(), 0);
}

CHECK_MAIN()
