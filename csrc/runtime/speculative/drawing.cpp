#include "runtime/speculative/drawing.h"

#include <algorithm>
#include <cmath>

namespace effinfer::runtime {

void find_candidates(std::span<const float> logits, std::span<const int32_t> tokens,
                     const SamplingParams& params, std::vector<Draft::Candidate>& out) {
  out.clear();
  size_t count = std::min(tokens.size(), static_cast<size_t>(Draft::kMostCandidates));
  if (params.top_k > 0) count = std::min(count, static_cast<size_t>(params.top_k));
  if (params.temperature == 0.0f) count = std::min(count, size_t{1});
  const float temperature = params.temperature == 0.0f ? 1.0f : params.temperature;
  double total = 0.0;
  for (size_t i = 0; i < count; ++i) {
    const float weight = std::exp((logits[i] - logits[0]) / temperature);
    if (!(weight > 0.0f) || weight < params.min_p) break;
    out.push_back({tokens[i], weight});
    total += static_cast<double>(weight);
  }
  double sum = 0.0;
  size_t kept = 0;
  while (kept < out.size() && sum < static_cast<double>(params.top_p) * total) {
    sum += static_cast<double>(out[kept++].probability);
  }
  out.resize(std::max<size_t>(kept, std::min<size_t>(out.size(), 1)));
  if (kept == 0) sum = out.empty() ? 1.0 : static_cast<double>(out[0].probability);
  for (Draft::Candidate& c : out) {
    c.probability = static_cast<float>(static_cast<double>(c.probability) / sum);
  }
}

int32_t draw_child(std::span<const Draft::Candidate> candidates, Draft::Draw draw,
                   std::span<const int32_t> siblings, double uniform) {
  const auto mass = [&](const Draft::Candidate& c) {
    const bool taken = draw == Draft::Draw::without_replacement &&
                       std::find(siblings.begin(), siblings.end(), c.token) != siblings.end();
    return taken ? 0.0 : static_cast<double>(c.probability);
  };
  double total = 0.0;
  for (const Draft::Candidate& c : candidates) total += mass(c);
  double left = uniform * total;
  int32_t last = -1;
  for (const Draft::Candidate& c : candidates) {
    if (!(mass(c) > 0.0)) continue;
    last = c.token;
    left -= mass(c);
    if (left < 0.0) break;
  }
  return last;
}

}  // namespace effinfer::runtime
