// Small models and what is drawn from them: for tests of verifiers. A model gives a distribution
// behind each text; a draft is drawn from a model's, by a shape.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "effinfer/speculative.h"
#include "runtime/speculative/walks.h"

namespace verify {

// Whether there is time for all that can be checked (`make test-slow`).
inline bool is_slow() {
  return std::getenv("EFFINFER_SLOW_TESTS") != nullptr;
}

using effinfer::Draft;
using effinfer::runtime::Chance;
using effinfer::runtime::Path;
using effinfer::runtime::TargetRows;
using Text = std::vector<int32_t>;
using Row = std::vector<double>;

// A random distribution behind each text, a hard-to-guess or a sharp one, some tokens impossible.
class ToyModel {
 public:
  ToyModel(size_t vocab, uint32_t seed) : vocab_(vocab), seed_(seed) {}
  size_t vocab() const { return vocab_; }
  const Row& behind(const Text& text) const {
    const auto known = rows_.find(text);
    if (known != rows_.end()) return known->second;
    uint32_t hash = seed_ * 2654435761u + 1;
    for (const int32_t token : text) hash = (hash ^ static_cast<uint32_t>(token + 1)) * 16777619u;
    std::mt19937 random(hash);
    random.discard(7);
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    Row row(vocab_);
    const double sharpness = 0.5 + 4.0 * uniform(random);
    double sum = 0.0;
    for (double& p : row) {
      p = uniform(random) < 0.15 ? 0.0 : std::exp(sharpness * uniform(random));
      sum += p;
    }
    if (sum == 0.0) sum = row[0] = 1.0;
    for (double& p : row) p /= sum;
    return rows_.emplace(text, std::move(row)).first->second;
  }

 private:
  size_t vocab_;
  uint32_t seed_;
  mutable std::map<Text, Row> rows_;
};

inline Text path_text(const Draft& draft, int32_t node) {
  Text text;
  for (; node >= 0; node = draft.parents[static_cast<size_t>(node)]) {
    text.insert(text.begin(), draft.tokens[static_cast<size_t>(node)]);
  }
  return text;
}

// Every way in which something that leaves choices to chance may go, each with its probability.
class Enumeration final : public Chance {
 public:
  // body() is run for each way; then seen(probability).
  void run(const std::function<void()>& body, const std::function<void(double)>& seen) {
    script_.clear();
    do {
      next_ = 0;
      probability_ = 1.0;
      body();
      if (probability_ > 0.0) seen(probability_);
    } while (advance());
  }
  bool happens(double probability) override {
    const double no = 1.0 - probability;
    return draw(std::vector<double>{no, probability}) == 1;
  }
  int32_t draw(std::span<const double> weights) override {
    double total = 0.0;
    for (const double weight : weights) total += weight;
    if (next_ == script_.size()) {
      size_t first = 0;
      while (first + 1 < weights.size() && weights[first] <= 0.0) ++first;
      script_.push_back({first, first});
    }
    Choice& choice = script_[next_++];
    choice.later = choice.now + 1;
    while (choice.later < weights.size() && weights[choice.later] <= 0.0) ++choice.later;
    if (choice.later >= weights.size()) choice.later = choice.now;
    probability_ *= weights[choice.now] / total;
    return static_cast<int32_t>(choice.now);
  }

 private:
  struct Choice {
    size_t now;
    size_t later;  // the next one that is possible; now: there is none
  };
  bool advance() {
    while (!script_.empty() && script_.back().later == script_.back().now) script_.pop_back();
    if (script_.empty()) return false;
    script_.back().now = script_.back().later;
    return true;
  }

  std::vector<Choice> script_;
  size_t next_ = 0;
  double probability_ = 1.0;
};

// Fills a draft of this shape, a parent a node, with tokens that `chance` draws from the model.
// Float probabilities, as drafts have them, are what is drawn from. False: nothing is left to draw.
inline bool draw_tree(const ToyModel& model, const std::vector<int32_t>& shape, Draft::Draw draw,
                      Chance& chance, Draft& draft) {
  draft.clear();
  draft.draw = draw;
  for (const int32_t parent : shape) {
    const Row& q = model.behind(path_text(draft, parent));
    Row left(q.size());
    for (size_t t = 0; t < q.size(); ++t) left[t] = static_cast<double>(static_cast<float>(q[t]));
    if (draft.candidates_of(parent + 1).empty()) {
      std::vector<Draft::Candidate> list;
      for (size_t t = 0; t < q.size(); ++t) {
        if (q[t] > 0.0) list.push_back({static_cast<int32_t>(t), static_cast<float>(q[t])});
      }
      draft.set_candidates(parent + 1, list);
    }
    for (size_t i = 0; i < draft.tokens.size(); ++i) {
      if (draw != Draft::Draw::without_replacement || draft.parents[i] != parent) continue;
      left[static_cast<size_t>(draft.tokens[i])] = 0.0;
    }
    if (std::all_of(left.begin(), left.end(), [](double p) { return p <= 0.0; })) return false;
    draft.add(chance.draw(left), parent, 0.5f);
  }
  return true;
}

// All trees of so many nodes, as parents in preorder.
inline std::vector<std::vector<int32_t>> all_shapes(int32_t nodes) {
  std::vector<std::vector<int32_t>> shapes = {{}};
  for (int32_t n = 0; n < nodes; ++n) {
    std::vector<std::vector<int32_t>> longer;
    for (const auto& shape : shapes) {
      // A node of preorder descends from the one before it or from one of its ancestors.
      for (int32_t parent = n - 1;; parent = shape[static_cast<size_t>(parent)]) {
        longer.push_back(shape);
        longer.back().push_back(parent);
        if (parent < 0) break;
      }
    }
    shapes = std::move(longer);
  }
  return shapes;
}

// P(chi-square with `freedom` degrees >= x): the regularised upper incomplete gamma function, as
// the series of the lower one or as Lentz's continued fraction.
inline double chi_square_p(double x, int freedom) {
  const double a = freedom / 2.0;
  const double half = x / 2.0;
  if (half <= 0.0) return 1.0;
  const double front = std::exp(a * std::log(half) - half - std::lgamma(a));
  if (half < a + 1.0) {
    double term = 1.0 / a;
    double sum = term;
    for (double n = a + 1.0; term > sum * 1e-15; n += 1.0) sum += term *= half / n;
    return 1.0 - front * sum;
  }
  double b = half + 1.0 - a;
  double c = 1e300;
  double d = 1.0 / b;
  double h = d;
  for (int i = 1; i < 10000; ++i) {
    const double an = -i * (i - a);
    b += 2.0;
    d = 1.0 / (an * d + b);
    c = b + an / c;
    h *= d * c;
    if (std::abs(d * c - 1.0) < 1e-14) break;
  }
  return front * h;
}

// The p-value of counts under expected probabilities; cells of fewer than 8 expected draws are one.
inline double fit(const std::map<Text, int64_t>& counts, const std::map<Text, double>& expected) {
  int64_t draws = 0;
  for (const auto& [text, count] : counts) {
    draws += count;
    const auto cell = expected.find(text);
    if (cell == expected.end() || cell->second <= 0.0) return 0.0;  // an impossible text
  }
  double chi = 0.0;
  double rare_expected = 0.0;
  double rare_count = 0.0;
  int cells = 0;
  const auto add = [&](double count, double mean) {
    chi += (count - mean) * (count - mean) / mean;
    ++cells;
  };
  for (const auto& [text, p] : expected) {
    const double mean = p * static_cast<double>(draws);
    const auto found = counts.find(text);
    const double count = found == counts.end() ? 0.0 : static_cast<double>(found->second);
    if (mean >= 8.0) {
      add(count, mean);
    } else {
      rare_expected += mean;
      rare_count += count;
    }
  }
  if (rare_expected > 0.0) add(rare_count, std::max(rare_expected, 1e-9));
  return chi_square_p(chi, cells - 1);
}

}  // namespace verify
