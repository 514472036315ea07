// Sums over the records of a profile.
#include "effinfer/profile.h"

#include <algorithm>
#include <map>
#include <utility>

namespace effinfer {
namespace {

using Key = std::pair<std::string, std::string>;  // kernel, what

void add_call(KernelSummary& row, const Profile& profile, const StepRecord& step, size_t call) {
  const CallTimes& first = step.time(0, call);
  ++row.calls;
  row.time_ns += first.end_ns - first.begin_ns;
  for (int thread = 0; thread < profile.threads; ++thread) {
    const CallTimes& times = step.time(thread, call);
    row.threads_ns += times.end_ns - times.begin_ns;
    row.wait_ns += times.end_ns - times.done_ns;
  }
  row.bytes += step.calls[call].bytes;
  row.ops += step.calls[call].ops;
}

// Sums over all threads. One alone would not do: a thread that comes late finds the work done.
int64_t threads_time(const Profile& profile, const StepRecord& step, size_t call) {
  int64_t sum = 0;
  for (int thread = 0; thread < profile.threads; ++thread) {
    sum += step.time(thread, call).end_ns - step.time(thread, call).begin_ns;
  }
  return sum;
}

}  // namespace

PhaseSummary summarize(const Profile& profile, Phase phase) {
  PhaseSummary sum;
  std::map<Key, KernelSummary> rows;
  std::vector<int64_t> least(profile.calls.size(), -1);
  const StepRecord* previous = nullptr;
  for (const StepRecord& step : profile.steps) {
    const StepRecord* before = std::exchange(previous, &step);
    if (step.phase != phase || step.cancelled) continue;
    if (before != nullptr && before->phase == phase) {
      sum.between_ns += step.begin_ns - before->end_ns;
      ++sum.between_count;
    }
    ++sum.steps;
    sum.tokens += step.tokens;
    sum.barriers += step.barriers;
    sum.step_ns += step.end_ns - step.begin_ns;
    for (size_t call = 0; call < step.calls.size(); ++call) {
      const CallInfo& info = profile.calls[static_cast<size_t>(step.calls[call].info)];
      const auto [place, is_new] = rows.try_emplace(Key{info.kernel, info.what});
      if (is_new) place->second.info = info;
      add_call(place->second, profile, step, call);
      int64_t& shortest = least[static_cast<size_t>(step.calls[call].info)];
      const int64_t time = threads_time(profile, step, call);
      shortest = shortest < 0 ? time : std::min(shortest, time);
    }
  }
  for (size_t i = 0; i < least.size(); ++i) {
    const CallInfo& info = profile.calls[i];
    if (least[i] >= 0) rows.at(Key{info.kernel, info.what}).least_ns += least[i];
  }
  sum.host_ns = sum.step_ns;
  for (auto& [key, row] : rows) {
    row.least_ns /= profile.threads;
    sum.host_ns -= row.time_ns;
    sum.kernels.push_back(std::move(row));
  }
  std::stable_sort(
      sum.kernels.begin(), sum.kernels.end(),
      [](const KernelSummary& a, const KernelSummary& b) { return a.time_ns > b.time_ns; });
  return sum;
}

double overlapped_share(const Profile& work, const Profile& beside) {
  int64_t all = 0;
  int64_t both = 0;
  size_t first = 0;
  for (const StepRecord& step : work.steps) {
    all += step.end_ns - step.begin_ns;
    while (first < beside.steps.size() && beside.steps[first].end_ns <= step.begin_ns) ++first;
    for (size_t i = first; i < beside.steps.size(); ++i) {
      const StepRecord& other = beside.steps[i];
      if (other.begin_ns >= step.end_ns) break;
      both += std::min(step.end_ns, other.end_ns) - std::max(step.begin_ns, other.begin_ns);
    }
  }
  return all == 0 ? 0.0 : static_cast<double>(both) / static_cast<double>(all);
}

}  // namespace effinfer
