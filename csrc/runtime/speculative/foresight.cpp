#include "runtime/speculative/foresight.h"

#include <algorithm>
#include <cmath>

#include "core/philox.h"
#include "runtime/speculative/drawing.h"

namespace effinfer::runtime {
namespace {

double laplace_below(double x, double mean, double scale) {
  const double tail = 0.5 * std::exp(-std::abs(x - mean) / scale);
  return x < mean ? tail : 1.0 - tail;
}

}  // namespace

void Foresight::count(const Firsts& firsts, int32_t drawn) {
  for (size_t i = 0; i < firsts.size(); ++i) {
    right_[i] = kMemory * right_[i] + (firsts[i] == drawn ? 1.0 : 0.0);
  }
}

// Among equals a narrow one: at first the models are taken for the same.
size_t Foresight::best() const {
  return static_cast<size_t>(std::max_element(right_.begin(), right_.end()) - right_.begin());
}

void Guesser::find(std::span<const float> logits, std::span<const int32_t> tokens, size_t count,
                   std::vector<Likely>& out) const {
  const auto weight = [&](float logit) {
    return std::exp(static_cast<double>(logit - logits.front()));
  };
  double total = 0.0;
  for (const float logit : logits) total += weight(logit);
  out.clear();
  for (size_t i = 0; i < std::min(count, tokens.size()); ++i) {
    out.push_back({tokens[i], static_cast<float>(weight(logits[i]) / total)});
  }
}

Foresight::Firsts Guesser::find_drawn(std::span<const float> logits,
                                      std::span<const int32_t> tokens, const KnownDraw& draw,
                                      size_t count, std::vector<Likely>& out) {
  find_candidates(logits, tokens, *draw.params, shares_);
  std::sort(shares_.begin(), shares_.end(),
            [](const auto& a, const auto& b) { return a.token < b.token; });
  const double number = philox_uniform(draw.params->seed, draw.index);
  const auto likelier = [](const Likely& a, const Likely& b) { return a.score > b.score; };
  Foresight::Firsts firsts;
  for (size_t i = 0; i < firsts.size(); ++i) {
    const double scale = Foresight::kSpreads[i];
    double end = 0.0;
    double before = laplace_below(end, number, scale);
    const double all = laplace_below(1.0, number, scale) - before;
    ranked_.clear();
    for (const Draft::Candidate& share : shares_) {
      end += static_cast<double>(share.probability);
      const double below = laplace_below(end, number, scale);
      ranked_.push_back({share.token, static_cast<float>(std::min((below - before) / all, 1.0))});
      before = below;
    }
    firsts[i] = std::min_element(ranked_.begin(), ranked_.end(), likelier)->token;
    if (i != draw.spread) continue;
    const auto kept = static_cast<ptrdiff_t>(std::min(count, ranked_.size()));
    std::partial_sort(ranked_.begin(), ranked_.begin() + kept, ranked_.end(), likelier);
    out.assign(ranked_.begin(), ranked_.begin() + kept);
  }
  return firsts;
}

}  // namespace effinfer::runtime
