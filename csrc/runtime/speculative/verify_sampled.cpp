// Verifiers that need the target's distributions: rejection, traversal and typical acceptance.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/speculative.h"
#include "runtime/speculative/walks.h"

namespace effinfer {
namespace {

using runtime::Path;

// Draw 0 of a token is what sample() uses.
class RowChance final : public runtime::Chance {
 public:
  explicit RowChance(const TokenRows& rows) : rows_(rows) {}
  bool happens(double probability) override { return rows_.uniform(++draws_) < probability; }
  int32_t draw(std::span<const double> weights) override {
    double total = 0.0;
    for (const double weight : weights) total += weight;
    double left = rows_.uniform(++draws_) * total;
    int32_t last = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (weights[i] <= 0.0) continue;
      last = static_cast<int32_t>(i);
      left -= weights[i];
      if (left < 0.0) break;
    }
    return last;
  }

 private:
  const TokenRows& rows_;
  uint32_t draws_ = 0;
};

// A walk over the rows of a step, and what it found as tokens.
class WalkingVerifier : public Verifier {
 public:
  bool needs_distributions() const override { return true; }
  void verify(const Draft& draft, TokenRows& rows) override {
    path_.nodes.clear();
    path_.token = -1;
    if (draft.size() > 0) {
      RowChance chance(rows);
      walk(draft, [&](int32_t row) { return target(rows, row); }, chance, path_);
    }
    int32_t row = 0;
    for (const int32_t node : path_.nodes) {
      const int32_t token = draft.tokens[static_cast<size_t>(node)];
      if (!rows.emit(row, rows.scored(row, token))) return;
      row = node + 1;
    }
    rows.emit(row, path_.token < 0 ? rows.sample(row) : rows.scored(row, path_.token));
  }

 private:
  virtual void walk(const Draft& draft, const runtime::TargetRows& target, runtime::Chance& chance,
                    Path& path) = 0;

  std::span<double> target(TokenRows& rows, int32_t row) {
    floats_.resize(static_cast<size_t>(rows.vocab_size()));
    target_.resize(floats_.size());
    rows.distribution(row, floats_);
    double total = 0.0;
    for (const float p : floats_) total += static_cast<double>(p);
    for (size_t i = 0; i < floats_.size(); ++i) {
      target_[i] = static_cast<double>(floats_[i]) / total;
    }
    return target_;
  }

  Path path_;
  std::vector<float> floats_;
  std::vector<double> target_;
};

// One whose tokens have the target's distribution, as the walk proves it.
template <class Walk>
class ExactVerifier final : public WalkingVerifier {
 public:
  explicit ExactVerifier(std::string_view name) : name_(name) {}
  std::string_view name() const override { return name_; }
  Guarantee guarantee() const override { return Guarantee::same_distribution; }
  bool needs_probabilities() const override { return true; }

 private:
  void walk(const Draft& draft, const runtime::TargetRows& target, runtime::Chance& chance,
            Path& path) override {
    walk_.run(draft, target, chance, path);
  }
  std::string_view name_;
  Walk walk_;
};

class TypicalVerifier final : public WalkingVerifier {
 public:
  TypicalVerifier(double epsilon, double delta) : walk_(epsilon, delta) {}
  std::string_view name() const override { return "typical"; }
  Guarantee guarantee() const override { return Guarantee::lossy; }

 private:
  void walk(const Draft& draft, const runtime::TargetRows& target, runtime::Chance&,
            Path& path) override {
    walk_.run(draft, target, path);
  }
  runtime::TypicalWalk walk_;
};

void check_share(const char* what, double value) {
  if (value >= 0.0 && value <= 1.0) return;
  throw InvalidArgument(std::string("[speculation] ") + what + ": expected a number in [0, 1], " +
                        "got " + std::to_string(value));
}

}  // namespace

std::shared_ptr<Verifier> rejection_verifier() {
  return std::make_shared<ExactVerifier<runtime::RejectionWalk>>("rejection");
}

std::shared_ptr<Verifier> traversal_verifier() {
  return std::make_shared<ExactVerifier<runtime::TraversalWalk>>("traversal");
}

std::shared_ptr<Verifier> typical_verifier(double epsilon, double delta) {
  check_share("epsilon", epsilon);
  check_share("delta", delta);
  return std::make_shared<TypicalVerifier>(epsilon, delta);
}

}  // namespace effinfer
