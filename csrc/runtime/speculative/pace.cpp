#include "runtime/speculative/pace.h"

#include <algorithm>

namespace effinfer::runtime {

void Pace::count(int32_t depth, int32_t right) {
  const int32_t seen = std::min({depth, right + 1, kMostDepth});
  for (int32_t d = 0; d < seen; ++d) {
    const auto at = static_cast<size_t>(d);
    tried_[at] = kMemory * tried_[at] + 1.0;
    right_[at] = kMemory * right_[at] + (d < right ? 1.0 : 0.0);
  }
}

int32_t Pace::depth(int32_t most) {
  most = std::min(most, kMostDepth);
  if (step_s_ == 0.0 || level_s_ == 0.0) return most;
  double path = 1.0;
  double tokens = 1.0;
  double belief = 0.7;
  double best_rate = 1.0 / step_s_;
  int32_t best = 0;
  for (int32_t d = 1; d <= most; ++d) {
    const auto at = static_cast<size_t>(d) - 1;
    belief = (right_[at] + kTrust * belief) / (tried_[at] + kTrust);
    path *= belief;
    tokens += path;
    const double rate = tokens / (step_s_ + d * level_s_);
    if (rate > best_rate) {
      best_rate = rate;
      best = d;
    }
  }
  if (best > 0) {
    idle_ = 0;
  } else if (++idle_ % kRare == 0) {
    best = std::min(most, 2);
  }
  return best;
}

}  // namespace effinfer::runtime
