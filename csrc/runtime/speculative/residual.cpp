#include "runtime/speculative/residual.h"

#include <algorithm>

#include "effinfer/error.h"

namespace effinfer::runtime {

void Residual::start(std::span<const double> target, const Draft& draft, int32_t row,
                     std::span<const int32_t> children) {
  const std::span<const Draft::Candidate> candidates = draft.candidates_of(row);
  draw_ = candidates.empty() ? Draft::Draw::none : draft.draw;
  entries_.clear();
  guesses_ = 0.0;
  factor_ = 1.0;
  double inside = 0.0;
  const auto add = [&](int32_t token, double guess) {
    const double mass = target[static_cast<size_t>(token)];
    entries_.push_back({token, mass, guess});
    guesses_ += guess;
    inside += mass;
  };
  for (const Draft::Candidate& c : candidates) add(c.token, static_cast<double>(c.probability));
  for (const int32_t child : children) {
    const int32_t token = draft.tokens[static_cast<size_t>(child)];
    const auto known = [&](const Entry& entry) { return entry.token == token; };
    if (std::none_of(entries_.begin(), entries_.end(), known)) add(token, 0.0);
  }
  outside_ = std::max(0.0, 1.0 - inside);
}

const Residual::Entry& Residual::find(int32_t token) const {
  const auto known = [&](const Entry& entry) { return entry.token == token; };
  const auto entry = std::find_if(entries_.begin(), entries_.end(), known);
  if (entry == entries_.end()) throw InternalError("[speculation] residual: an unknown token");
  return *entry;
}

double Residual::guess(int32_t token) const {
  return draw_ == Draft::Draw::none ? 1.0 : find(token).guess / guesses_;
}

double Residual::refuse(int32_t token, double keep) {
  const bool drawn = draw_ != Draft::Draw::none;
  outside_ *= keep;
  factor_ *= keep;
  double mass = outside_;
  for (Entry& entry : entries_) {
    const double chosen = entry.token == token ? 1.0 : 0.0;
    const double guess = drawn ? entry.guess / guesses_ : chosen;
    entry.target = std::max(0.0, keep * entry.target - guess);
    mass += entry.target;
  }
  if (!(mass > 0.0)) return 0.0;
  outside_ /= mass;
  factor_ /= mass;
  double guesses = 0.0;
  for (Entry& entry : entries_) {
    entry.target /= mass;
    if (draw_ == Draft::Draw::without_replacement && entry.token == token) entry.guess = 0.0;
    guesses += entry.guess;
  }
  guesses_ = guesses;
  return mass;
}

void Residual::apply(std::span<double> target) const {
  for (double& mass : target) mass *= factor_;
  for (const Entry& entry : entries_) target[static_cast<size_t>(entry.token)] = entry.target;
}

}  // namespace effinfer::runtime
