#include "runtime/speculative/pace.h"

#include <algorithm>
#include <cmath>

namespace effinfer::runtime {

void Pace::count(int32_t depth, int32_t right) {
  const int32_t seen = std::min({depth, right + 1, kMostDepth});
  for (int32_t d = 0; d < seen; ++d) {
    const auto at = static_cast<size_t>(d);
    tried_[at] = kMemory * tried_[at] + 1.0;
    right_[at] = kMemory * right_[at] + (d < right ? 1.0 : 0.0);
  }
}

void Pace::add_draft(double seconds) {
  elapsed_s_ += seconds;
  if (!tries_ || seconds == 0.0) return;
  tried_s_ += seconds;
  last_try_s_ = seconds;
}

void Pace::add_step(double seconds, bool drafted) {
  elapsed_s_ += seconds;
  if (drafted) step_s_ = blend(step_s_, seconds);
}

size_t Pace::bin_of(float score) {
  const double p = std::clamp(static_cast<double>(score), 1e-6, 1.0 - 1e-6);
  const double odds = std::log2(p / (1.0 - p)) + kBins / 2.0;
  return static_cast<size_t>(std::clamp(odds, 0.0, kBins - 1.0));
}

void Pace::count_guess(float score, bool right) {
  Bin& bin = bins_[bin_of(score)];
  bin.tried = kMemory * bin.tried + 1.0;
  bin.right = kMemory * bin.right + (right ? 1.0 : 0.0);
}

float Pace::belief(float score) const {
  const Bin& bin = bins_[bin_of(score)];
  const double believed = kTrust * static_cast<double>(score);
  return static_cast<float>((bin.right + believed) / (bin.tried + kTrust));
}

int32_t Pace::depth(int32_t most) {
  most = std::min(most, kMostDepth);
  tries_ = step_s_ == 0.0 || level_s_ == 0.0;
  if (tries_) return std::min(most, kTried);
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
  rate_ = best_rate;
  if (best > 0) {
    idle_ = 0;
    rare_ = kRare;
  } else if (++idle_ >= rare_ && tried_s_ + last_try_s_ <= kMostLoss * elapsed_s_) {
    // The model has to read what it missed first, so a vain try is followed by fewer.
    idle_ = 0;
    rare_ = std::min(2 * rare_, kRarest);
    best = std::min(most, kTried);
    tries_ = true;
  }
  return best;
}

}  // namespace effinfer::runtime
