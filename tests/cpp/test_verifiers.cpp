// Verifiers that sample keep the target's distribution: all outcomes of small trees are enumerated.
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "effinfer/speculative.h"
#include "runtime/speculative/drawing.h"
#include "verifier_models.h"

using namespace effinfer;
using namespace verify;

namespace {

constexpr size_t kVocab = 4;

// A verifier's walk; `bias` is a planted error.
using Walk = std::function<void(const Draft&, const TargetRows&, Chance&, Path&)>;

Walk rejection() {
  return [walk = std::make_shared<runtime::RejectionWalk>()](
             const Draft& draft, const TargetRows& target, Chance& chance, Path& path) {
    walk->run(draft, target, chance, path);
  };
}
Walk traversal() {
  return [walk = std::make_shared<runtime::TraversalWalk>()](
             const Draft& draft, const TargetRows& target, Chance& chance, Path& path) {
    walk->run(draft, target, chance, path);
  };
}

// Accepts a little more often than it should.
class Biased final : public Chance {
 public:
  explicit Biased(Chance& chance) : chance_(chance) {}
  bool happens(double p) override { return chance_.happens(std::min(1.0, p * 1.05)); }
  int32_t draw(std::span<const double> weights) override { return chance_.draw(weights); }

 private:
  Chance& chance_;
};

struct Outcome {
  std::map<Text, double> texts;  // what is emitted
  double accepted = 0.0;         // expected
};

// Everything that drawing a tree of that shape and verifying it may emit.
Outcome enumerate(const ToyModel& target, const ToyModel& draft_model,
                  const std::vector<int32_t>& shape, Draft::Draw draw, const Walk& walk,
                  bool biased = false) {
  Outcome outcome;
  Enumeration ways;
  Draft draft;
  Text text;
  Path path;
  const auto body = [&] {
    Biased bias(ways);
    Chance& chance = biased ? static_cast<Chance&>(bias) : ways;
    // Where nothing is left to draw the tree is smaller.
    if (!draw_tree(draft_model, shape, draw, ways, draft)) CHECK(draw != Draft::Draw::none);
    path = {};
    Row row;
    walk(
        draft,
        [&](int32_t r) {
          row = target.behind(path_text(draft, r - 1));
          return std::span<double>(row);
        },
        chance, path);
    text.clear();
    for (const int32_t node : path.nodes) text.push_back(draft.tokens[static_cast<size_t>(node)]);
    text.push_back(path.token >= 0 ? path.token : ways.draw(target.behind(text)));
  };
  ways.run(body, [&](double probability) {
    outcome.texts[text] += probability;
    outcome.accepted += probability * static_cast<double>(path.nodes.size());
  });
  return outcome;
}

// How far texts that go on by the target alone are from what the target alone would emit.
double distance(const ToyModel& target, const Outcome& outcome, size_t length) {
  double worst = 0.0;
  std::function<void(Text&, double, double)> compare = [&](Text& text, double expected,
                                                           double open) {
    // `open`: the probability of outcomes that are shorter than the text.
    const auto emitted = outcome.texts.find(text);
    const double here = open + (emitted == outcome.texts.end() ? 0.0 : emitted->second);
    double longer = 0.0;
    const auto begins = [&](const Text& other) {
      return other.size() > text.size() && std::equal(text.begin(), text.end(), other.begin());
    };
    for (auto it = outcome.texts.lower_bound(text); it != outcome.texts.end(); ++it) {
      if (it->first != text && !begins(it->first)) break;
      if (it->first != text) longer += it->second;
    }
    worst = std::max(worst, std::abs(here + longer - expected));
    if (text.size() == length) return;
    const Row& p = target.behind(text);
    for (size_t t = 0; t < p.size(); ++t) {
      text.push_back(static_cast<int32_t>(t));
      compare(text, expected * p[t], here * p[t]);
      text.pop_back();
    }
  };
  Text text;
  compare(text, 1.0, 0.0);
  return worst;
}

constexpr Draft::Draw kDraws[] = {Draft::Draw::with_replacement, Draft::Draw::without_replacement};

int children_of(const std::vector<int32_t>& shape) {
  std::map<int32_t, int> counts;
  int most = 0;
  for (const int32_t parent : shape) most = std::max(most, ++counts[parent]);
  return most;
}

// Every n-th shape of that size.
void check_shapes(int32_t nodes, size_t every, uint32_t seed) {
  const auto shapes = all_shapes(nodes);
  std::mt19937 random(seed);
  for (size_t i = seed % every; i < shapes.size(); i += every) {
    const ToyModel target(kVocab, random());
    const ToyModel draft_model(kVocab, random());
    for (const Draft::Draw draw : kDraws) {
      const bool all = draw == Draft::Draw::without_replacement;
      if (all && children_of(shapes[i]) > static_cast<int>(kVocab)) continue;
      for (const Walk& walk : {rejection(), traversal()}) {
        const Outcome outcome = enumerate(target, draft_model, shapes[i], draw, walk);
        // Float probabilities of the draft sum to 1 within 1e-7; products of a path's.
        const double worst = distance(target, outcome, static_cast<size_t>(nodes) + 1);
        CHECK(worst < 1e-12);
        if (worst >= 1e-12) std::fprintf(stderr, "nodes %d shape %zu: %g\n", nodes, i, worst);
      }
    }
  }
}

}  // namespace

TEST("shapes are all trees") {
  CHECK_EQ(all_shapes(3).size(), size_t{5});
  CHECK_EQ(all_shapes(5).size(), size_t{42});
  CHECK_EQ(all_shapes(7).size(), size_t{429});
}

TEST("every outcome of small trees has the target's probability") {
  for (int32_t nodes = 0; nodes <= 4; ++nodes)
    check_shapes(nodes, 1, 1 + static_cast<uint32_t>(nodes));
  check_shapes(5, is_slow() ? 1 : 8, 3);
  check_shapes(6, is_slow() ? 1 : 60, 7);
  check_shapes(7, is_slow() ? 10 : 400, 11);
}

TEST("a planted bias shows") {
  const ToyModel target(kVocab, 5);
  const ToyModel draft_model(kVocab, 6);
  for (const Walk& walk : {rejection(), traversal()}) {
    const Outcome outcome =
        enumerate(target, draft_model, {-1, 0, -1}, Draft::Draw::with_replacement, walk, true);
    CHECK(distance(target, outcome, 4) > 1e-3);
  }
}

TEST("traversal accepts at least what rejection does, of chains more") {
  double more = 0.0;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    const ToyModel target(kVocab, 100 + seed);
    const ToyModel draft_model(kVocab, 200 + seed);
    const std::vector<int32_t> chain = {-1, 0, 1};
    const auto accepted = [&](const Walk& walk) {
      return enumerate(target, draft_model, chain, Draft::Draw::with_replacement, walk).accepted;
    };
    const double from_root = accepted(rejection());
    const double from_leaf = accepted(traversal());
    CHECK(from_leaf >= from_root - 1e-12);
    more += from_leaf - from_root;
  }
  CHECK(more > 0.05);
}

TEST("a chosen child is accepted with its probability, and the target is kept") {
  std::mt19937 random(4);
  for (int round = 0; round < 40; ++round) {
    const ToyModel target(kVocab, random());
    Draft draft;
    for (int32_t i = 0; i < 6; ++i) {
      const auto parent = static_cast<int32_t>(random() % static_cast<uint32_t>(i + 1)) - 1;
      const auto token = static_cast<int32_t>(random() % kVocab);
      if (draft.child(parent, token) < 0) draft.add(token, parent, 0.5f);
    }
    for (const Walk& walk : {rejection(), traversal()}) {
      Outcome outcome;
      Enumeration ways;
      Text text;
      ways.run(
          [&] {
            Path path;
            Row row;
            walk(
                draft,
                [&](int32_t r) {
                  row = target.behind(path_text(draft, r - 1));
                  return std::span<double>(row);
                },
                ways, path);
            text.clear();
            for (const int32_t node : path.nodes) {
              text.push_back(draft.tokens[static_cast<size_t>(node)]);
            }
            text.push_back(path.token >= 0 ? path.token : ways.draw(target.behind(text)));
          },
          [&](double p) { outcome.texts[text] += p; });
      CHECK(distance(target, outcome, 7) < 1e-12);
    }
  }
}

TEST("typical acceptance follows likely tokens and refuses others") {
  Draft draft;
  draft.add(0, -1, 0.5f);
  draft.add(1, -1, 0.5f);
  draft.add(2, 1, 0.5f);
  std::map<int32_t, Row> rows = {
      {0, {0.3, 0.6, 0.1, 0.0}}, {1, {0.25, 0.25, 0.25, 0.25}}, {2, {0.0, 0.0, 1.0, 0.0}}};
  runtime::TypicalWalk walk(0.09, 0.3);
  Path path;
  walk.run(draft, [&](int32_t row) { return std::span<double>(rows.at(row)); }, path);
  CHECK((path.nodes == std::vector<int32_t>{1, 2}));
  rows[2] = {0.96, 0.0, 0.04, 0.0};  // 0.04 < 0.09, and less than 0.3 exp(-0.17)
  path = {};
  walk.run(draft, [&](int32_t row) { return std::span<double>(rows.at(row)); }, path);
  CHECK((path.nodes == std::vector<int32_t>{0}));
}

TEST("candidates are narrowed as the request says") {
  const std::vector<float> logits = {3.0f, 2.0f, 1.0f, 0.0f};
  const std::vector<int32_t> tokens = {9, 4, 7, 1};
  std::vector<Draft::Candidate> out;
  SamplingParams params;
  runtime::find_candidates(logits, tokens, params, out);
  CHECK_EQ(out.size(), size_t{4});
  double sum = 0.0;
  for (const auto& c : out) sum += static_cast<double>(c.probability);
  CHECK(std::abs(sum - 1.0) < 1e-6);
  CHECK(std::abs(static_cast<double>(out[1].probability / out[0].probability) - std::exp(-1.0)) <
        1e-6);
  params.top_p = 0.6f;
  runtime::find_candidates(logits, tokens, params, out);
  CHECK_EQ(out.size(), size_t{1});
  params.top_p = 1.0f;
  params.top_k = 2;
  runtime::find_candidates(logits, tokens, params, out);
  CHECK_EQ(out.size(), size_t{2});
  params.temperature = 0.0f;
  runtime::find_candidates(logits, tokens, params, out);
  CHECK_EQ(out.size(), size_t{1});
  CHECK(out[0].token == 9 && out[0].probability == 1.0f);
}

CHECK_MAIN()
