#include "runtime/speculative/calibration.h"

#include <algorithm>
#include <cmath>

namespace effinfer::runtime {

size_t Calibration::odds_of(float score) {
  const float bounded = std::clamp(score, 1e-3f, 1.0f - 1e-4f);
  const float odds = std::log2(bounded / (1.0f - bounded));
  return static_cast<size_t>(std::clamp(static_cast<int>(std::lround(odds)) + 6, 0, kOdds - 1));
}

float Calibration::believed(uint8_t source, float score, int32_t depth) const {
  const float prior = std::min(score, 0.95f);
  const Bin& bin = bins_[source][odds_of(score)][depth_of(depth)];
  return (bin.right + kTrust * prior) / (bin.tried + kTrust);
}

float Calibration::probability(RequestId request, uint8_t source, float score,
                               int32_t depth) const {
  if (score == Draft::kProbe) {
    const Share& share = probes_[source];
    return std::min((share.right + kProbeTrust * kProbeWorth) / (share.expected + kProbeTrust),
                    0.99f);
  }
  const float general = believed(source, score, depth);
  const auto found = requests_.find(request);
  if (found == requests_.end()) return general;
  const Share& share = found->second[source];
  const float factor = (share.right + kRequestTrust) / (share.expected + kRequestTrust);
  return std::min(general * factor, 0.99f);
}

void Calibration::count(RequestId request, uint8_t source, float score, int32_t depth, bool right) {
  Share& share = requests_[request][source];
  const float hit = right ? 1.0f : 0.0f;
  share.expected = share.expected * kRequestMemory + believed(source, score, depth);
  share.right = share.right * kRequestMemory + hit;
  Bin& bin = bins_[source][odds_of(score)][depth_of(depth)];
  bin.tried = bin.tried * kMemory + 1.0f;
  bin.right = bin.right * kMemory + hit;
}

void Calibration::count_probes(const StepFacts& facts) {
  if (facts.verified == nullptr) return;
  const Draft& draft = *facts.verified;
  Shares step = {};
  for (size_t i = 0; i < draft.tokens.size(); ++i) {
    if (draft.scores[i] == Draft::kProbe) step[draft.sources[i]].expected += 1.0f;
  }
  for (const int32_t node : facts.accepted) {
    step[draft.sources[static_cast<size_t>(node)]].right += 1.0f;
  }
  for (size_t source = 0; source < step.size(); ++source) {
    if (step[source].expected == 0.0f) continue;
    Share& share = probes_[source];
    share.expected = share.expected * kRequestMemory + step[source].expected;
    share.right = share.right * kRequestMemory + step[source].right;
  }
}

void Calibration::observe(const StepFacts& facts) {
  requests_.try_emplace(facts.request);
  count_probes(facts);
  if (facts.proposed == nullptr) return;
  const Draft& draft = *facts.proposed;
  const std::span<const int32_t> emitted = facts.tokens.last(facts.num_emitted);
  std::array<int8_t, Draft::kMostNodes> depths;  // of nodes that were right; 0: it was not
  for (size_t i = 0; i < draft.tokens.size(); ++i) {
    const int32_t parent = draft.parents[i];
    depths[i] = 0;
    const int above = parent < 0 ? 0 : depths[static_cast<size_t>(parent)];
    if ((parent >= 0 && above == 0) || above >= static_cast<int>(emitted.size())) continue;
    const bool right = draft.tokens[i] == emitted[static_cast<size_t>(above)];
    if (right) depths[i] = static_cast<int8_t>(above + 1);
    if (draft.scores[i] == Draft::kProbe) continue;
    count(facts.request, draft.sources[i], draft.scores[i], above + 1, right);
  }
}

}  // namespace effinfer::runtime
