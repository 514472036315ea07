// Texts of the engine under verifiers that sample, counted: their frequencies are those of plain
// sampling, whatever is drafted. A planted bias is found.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/philox.h"
#include "effinfer/speculative.h"
#include "engine_harness.h"
#include "runtime/speculative/drawing.h"
#include "verifier_models.h"

using namespace effinfer;
using namespace fake;

namespace {

const std::vector<int32_t> kPrompt = {5, 60, 2};

// Logits near to the target's behind a text, wrong enough that much is refused. The highest of 97
// logits in [0, 4) are 0.04 apart: temperatures are small for that.
std::vector<float> guess_logits(const std::vector<int32_t>& contents) {
  std::vector<float> row(kVocab);
  fill_logits(contents, row.data());
  std::mt19937 random(static_cast<uint32_t>(row[0] * 1e5f) +
                      static_cast<uint32_t>(contents.size()));
  for (size_t i = 0; i < row.size() - 2; ++i) {
    row[i] += 0.05f * static_cast<float>(random() >> 8) * 0x1p-24f;
  }
  return row;
}

std::vector<int32_t> contents_of(std::span<const int32_t> tokens) {
  std::vector<int32_t> contents;
  for (size_t i = 0; i < tokens.size(); ++i) {
    contents.push_back(
        content(tokens[i], i < kPrompt.size() ? Phase::prefill : Phase::decode, false));
  }
  return contents;
}

// Draws a tree of one shape from its own idea of the text.
class Drawer final : public Proposer {
 public:
  Drawer(std::vector<int32_t> shape, Draft::Draw draw) : shape_(std::move(shape)), draw_(draw) {}
  std::string_view name() const override { return "drawer"; }
  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    for (size_t i = 0; i < views.size(); ++i) {
      CHECK(views[i].draws);
      draft(views[i], drafts[i]);
    }
  }
  void observe(std::span<const StepFacts> facts) override {
    for (const StepFacts& fact : facts) accepted += static_cast<int64_t>(fact.accepted.size());
  }
  int64_t accepted = 0;

 private:
  void draft(const DraftView& view, Draft& draft) {
    draft.draw = draw_;
    std::vector<Draft::Candidate> candidates;
    for (const int32_t parent : shape_) {
      if (draft.candidates_of(parent + 1).empty()) {
        std::vector<int32_t> text(view.tokens.begin(), view.tokens.end());
        const auto path = verify::path_text(draft, parent);
        text.insert(text.end(), path.begin(), path.end());
        const std::vector<float> logits = guess_logits(contents_of(text));
        std::vector<float> values(64);
        std::vector<int32_t> tokens(64);
        sampler_.highest(logits, values, tokens);
        runtime::find_candidates(values, tokens, *view.params, candidates);
        draft.set_candidates(parent + 1, candidates);
      }
      std::vector<int32_t> siblings;
      for (size_t i = 0; i < draft.tokens.size(); ++i) {
        if (draft.parents[i] == parent) siblings.push_back(draft.tokens[i]);
      }
      const auto candidates_here = draft.candidates_of(parent + 1);
      const bool none =
          draw_ == Draft::Draw::without_replacement && siblings.size() >= candidates_here.size();
      if (none) return;
      const double uniform = philox_uniform(view.params->seed, view.tokens.size(), 1,
                                            static_cast<uint32_t>(draft.size()));
      draft.add(runtime::draw_child(candidates_here, draw_, siblings, uniform), parent, 0.5f);
    }
  }

  std::vector<int32_t> shape_;
  Draft::Draw draw_;
  Sampler sampler_;
};

// A verifier to which chance is kinder than it is.
class BiasedVerifier final : public Verifier {
 public:
  explicit BiasedVerifier(std::shared_ptr<Verifier> verifier) : verifier_(std::move(verifier)) {}
  std::string_view name() const override { return "biased"; }
  Guarantee guarantee() const override { return Guarantee::lossy; }
  bool needs_distributions() const override { return true; }
  bool needs_probabilities() const override { return true; }
  void verify(const Draft& draft, TokenRows& rows) override {
    Rows biased(rows);
    verifier_->verify(draft, biased);
  }

 private:
  class Rows final : public TokenRows {
   public:
    explicit Rows(TokenRows& rows) : rows_(rows) {}
    RequestId request() const override { return rows_.request(); }
    SampledToken sample(int32_t row) override { return rows_.sample(row); }
    SampledToken scored(int32_t row, int32_t token) override { return rows_.scored(row, token); }
    int64_t vocab_size() const override { return rows_.vocab_size(); }
    void distribution(int32_t row, std::span<float> p) override { rows_.distribution(row, p); }
    double uniform(uint32_t draw) const override {
      return draw == 1 ? 0.9 * rows_.uniform(draw) : rows_.uniform(draw);
    }
    bool emit(int32_t row, SampledToken token) override {
      return rows_.emit(row, std::move(token));
    }

   private:
    TokenRows& rows_;
  };
  std::shared_ptr<Verifier> verifier_;
};

// The probability of every text of that length.
std::map<verify::Text, double> expected_texts(const SamplingParams& params, int32_t length) {
  Sampler sampler;
  std::map<verify::Text, double> texts = {{{}, 1.0}};
  for (int32_t n = 0; n < length; ++n) {
    std::map<verify::Text, double> longer;
    for (const auto& [text, probability] : texts) {
      std::vector<int32_t> all = kPrompt;
      all.insert(all.end(), text.begin(), text.end());
      std::vector<float> logits(kVocab);
      std::vector<float> p(kVocab);
      fill_logits(contents_of(all), logits.data());
      sampler.distribution(logits, params, kPrompt, text, p);
      for (int32_t token = 0; token < kVocab; ++token) {
        const float mass = p[static_cast<size_t>(token)];
        if (mass <= 0.0f) continue;
        verify::Text next = text;
        next.push_back(token);
        longer[next] = probability * static_cast<double>(mass);
      }
    }
    texts = std::move(longer);
  }
  return texts;
}

struct Result {
  double p = 0.0;
  int64_t accepted = 0;
};

Result measure(SamplingParams params, const std::vector<int32_t>& shape, Draft::Draw draw,
               const std::shared_ptr<Verifier>& verifier, int64_t draws) {
  constexpr int32_t kLength = 4;
  params.max_tokens = kLength;
  params.ignore_eos = true;
  const auto drawer = std::make_shared<Drawer>(shape, draw);
  Setup setup;
  setup.max_batch_tokens = 64;
  setup.prefix_cache = false;
  setup.speculation = {{drawer}, verifier, fixed_controller(63)};
  Harness harness(setup);
  std::map<verify::Text, int64_t> counts;
  int64_t added = 0;
  while (added < draws || harness.engine->has_work()) {
    for (; added < draws && harness.engine->stats().waiting < 8; ++added) {
      params.seed = static_cast<uint64_t>(added);
      harness.engine->add(kPrompt, params);
    }
    harness.outputs.clear();
    for (int i = 0; i < 8 * kLength && harness.engine->has_work(); ++i) {
      for (StepOutput& output : harness.engine->step()) {
        CHECK(output.error.empty() && output.warning.empty());
        auto& text = harness.outputs[output.request];
        text.tokens.insert(text.tokens.end(), output.tokens.begin(), output.tokens.end());
        if (output.finish == FinishReason::none) continue;
        verify::Text tokens;
        for (const SampledToken& token : text.tokens) tokens.push_back(token.token);
        ++counts[tokens];
        harness.outputs.erase(output.request);
        harness.engine->forget(output.request);
      }
    }
  }
  return {verify::fit(counts, expected_texts(params, kLength)), drawer->accepted};
}

SamplingParams sampled(float temperature, int32_t top_k, float top_p) {
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  return params;
}

}  // namespace

TEST("chi-square: tables") {
  CHECK(std::abs(verify::chi_square_p(3.841, 1) - 0.05) < 1e-4);
  CHECK(std::abs(verify::chi_square_p(18.307, 10) - 0.05) < 1e-4);
  CHECK(std::abs(verify::chi_square_p(149.449, 100) - 0.001) < 1e-5);
  CHECK(std::abs(verify::chi_square_p(70.065, 100) - 0.99) < 1e-3);
}

TEST("texts have the frequencies of plain sampling") {
  const int64_t draws = verify::is_slow() ? 1000000 : 12000 / check::kShare;
  struct Case {
    SamplingParams params;
    std::vector<int32_t> shape;
    Draft::Draw draw;
  };
  const auto with = Draft::Draw::with_replacement;
  const auto without = Draft::Draw::without_replacement;
  SamplingParams penalised = sampled(0.04f, 3, 1.0f);
  penalised.presence_penalty = 0.05f;
  const std::vector<Case> cases = {
      {sampled(0.04f, 4, 1.0f), {-1, 0, 1}, with},
      {sampled(0.06f, 0, 0.7f), {-1, -1, -1, 0, 0, 1}, with},
      {sampled(0.05f, 5, 0.95f), {-1, -1, -1, 0, 0, 3}, without},
      {penalised, {-1, -1, 0, 2}, without},
  };
  for (const bool from_leaves : {false, true}) {
    for (const Case& c : cases) {
      const Result result =
          measure(c.params, c.shape, c.draw,
                  from_leaves ? traversal_verifier() : rejection_verifier(), draws);
      // Bonferroni over the eight.
      CHECK(result.p * 8.0 > 0.001);
      CHECK(result.accepted > draws / 4);
      std::printf("  %s: p = %.3f, %.2f accepted a text\n", from_leaves ? "traversal" : "rejection",
                  result.p, static_cast<double>(result.accepted) / static_cast<double>(draws));
    }
  }
}

TEST("a planted bias is found") {
  if (check::kShare > 1) check::skip("it takes many draws, and no other code than those above");
  for (const bool from_leaves : {false, true}) {
    const auto biased =
        std::make_shared<BiasedVerifier>(from_leaves ? traversal_verifier() : rejection_verifier());
    const Result result =
        measure(sampled(0.04f, 4, 1.0f), {-1, 0, 1}, Draft::Draw::with_replacement, biased, 20000);
    CHECK(result.p < 1e-6);
    std::printf("  p = %.2g\n", result.p);
  }
}

TEST("drafts that were drawn from something else are refused") {
  const std::vector<std::function<void(Draft&)>> wrongs = {
      [](Draft& d) { d.set_candidates(0, std::vector<Draft::Candidate>{{1, 0.5f}}); },
      [](Draft& d) { d.set_candidates(0, std::vector<Draft::Candidate>{{1, -1.0f}, {2, 2.0f}}); },
      [](Draft& d) { d.set_candidates(0, std::vector<Draft::Candidate>{{2, 1.0f}}); },
      [](Draft& d) { d.set_candidates(0, std::vector<Draft::Candidate>{{kVocab, 1.0f}}); },
      [](Draft& d) { d.set_candidates(0, std::vector<Draft::Candidate>(65, {1, 1.0f / 65})); },
      [](Draft& d) {
        d.set_candidates(0, std::vector<Draft::Candidate>{{1, 1.0f}});
        d.add(1, -1, 0.5f);
      },
      [](Draft& d) {
        d.set_candidates(0, std::vector<Draft::Candidate>{{1, 1.0f}});
        d.draw = Draft::Draw::none;
      },
  };
  for (const auto& wrong : wrongs) {
    Draft draft;
    draft.draw = Draft::Draw::without_replacement;
    draft.add(1, -1, 0.5f);
    CHECK(runtime::trouble_of(draft, 4, {kVocab, kVocab}).empty());
    wrong(draft);
    CHECK(!runtime::trouble_of(draft, 4, {kVocab, kVocab}).empty());
  }
}

CHECK_MAIN()
