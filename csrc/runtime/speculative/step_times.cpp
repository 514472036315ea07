#include "runtime/speculative/step_times.h"

#include <algorithm>
#include <bit>
#include <cstddef>

namespace effinfer::runtime {

StepTimes::StepTimes() : buckets_(at(0, kContexts)) {}

int32_t StepTimes::context_of(int64_t kv_tokens) {
  const auto units = static_cast<uint64_t>(std::max<int64_t>(kv_tokens, 0)) / 256;
  return std::min<int32_t>(std::bit_width(units), kContexts - 1);
}

void StepTimes::add(int32_t rows, int64_t kv_tokens, double seconds) {
  if (rows < 1 || rows > kMostRows) return;
  const int32_t context = context_of(kv_tokens);
  Bucket& bucket = buckets_[at(rows, context)];
  // A median of 0 says that nothing was measured: a coarse clock must not.
  const double measured = std::max(seconds, 1e-9);
  bucket.seconds[static_cast<size_t>(bucket.next)] = static_cast<float>(measured);
  bucket.next = (bucket.next + 1) % kKept;
  bucket.count = std::min(bucket.count + 1, kKept);
  std::array<float, kKept> sorted = bucket.seconds;
  const auto middle = sorted.begin() + (bucket.count - 1) / 2;
  std::nth_element(sorted.begin(), middle, sorted.begin() + bucket.count);
  bucket.median = *middle;
  int32_t& least = least_[static_cast<size_t>(context)];
  if (least == 0 || rows < least) least = rows;
}

double StepTimes::of(int32_t rows, int64_t kv_tokens) const {
  rows = std::clamp(rows, 1, kMostRows);
  const int32_t context = context_of(kv_tokens);
  for (int32_t away = 0; away < kContexts; ++away) {
    for (const int32_t other : {context - away, context + away}) {
      if (other < 0 || other >= kContexts || least_[static_cast<size_t>(other)] == 0) continue;
      return in_context(rows, other);
    }
  }
  return 0.0;
}

int32_t StepTimes::count(int32_t rows, int64_t kv_tokens) const {
  if (rows < 1 || rows > kMostRows) return kKept;
  return buckets_[at(rows, context_of(kv_tokens))].count;
}

int32_t StepTimes::most_counted(int32_t rows) const {
  if (rows < 1 || rows > kMostRows) return kKept;
  int32_t most = 0;
  for (int32_t context = 0; context < kContexts; ++context) {
    most = std::max(most, buckets_[at(rows, context)].count);
  }
  return most;
}

double StepTimes::in_context(int32_t rows, int32_t context) const {
  double seconds = median(rows, context);
  if (seconds == 0.0) seconds = from_other_context(rows, context);
  if (seconds == 0.0) seconds = from_other_rows(rows, context);
  return seconds;
}

// As much longer than there as a step that both contexts know.
double StepTimes::from_other_context(int32_t rows, int32_t context) const {
  for (int32_t away = 1; away < kContexts; ++away) {
    for (const int32_t other : {context - away, context + away}) {
      if (other < 0 || other >= kContexts || median(rows, other) == 0.0) continue;
      const auto least = [&](int32_t c) { return least_[static_cast<size_t>(c)]; };
      for (const int32_t common : {least(context), least(other)}) {
        const double here = median(common, context);
        const double there = median(common, other);
        if (here > 0.0 && there > 0.0) return median(rows, other) * here / there;
      }
    }
  }
  return 0.0;
}

// Between two measured numbers of rows; beyond them as the prior has it.
double StepTimes::from_other_rows(int32_t rows, int32_t context) const {
  int32_t below = rows - 1;
  int32_t above = rows + 1;
  while (below >= 1 && median(below, context) == 0.0) --below;
  while (above <= kMostRows && median(above, context) == 0.0) ++above;
  if (below >= 1 && above <= kMostRows) {
    const double part = static_cast<double>(rows - below) / (above - below);
    return median(below, context) + part * (median(above, context) - median(below, context));
  }
  if (below >= 1) return median(below, context) * prior(rows) / prior(below);
  return median(above, context) * prior(rows) / prior(above);
}

}  // namespace effinfer::runtime
