#include "executor/recorder.h"

#include <algorithm>
#include <chrono>
#include <new>

namespace effinfer::executor {

Recorder::Recorder(const std::string& device, int threads, int32_t num_layers,
                   std::span<const Program> programs, std::span<const CallInfo> more,
                   int64_t max_steps)
    : programs_(programs) {
  profile_.device = device;
  profile_.threads = threads;
  profile_.num_layers = num_layers;
  size_t most = 0;
  for (const Program& program : programs) {
    first_info_.push_back(profile_.calls.size());
    profile_.calls.insert(profile_.calls.end(), program.infos.begin(), program.infos.end());
    most = std::max(most, program.calls.size() + more.size());
  }
  first_more_ = profile_.calls.size();
  profile_.calls.insert(profile_.calls.end(), more.begin(), more.end());
  try {
    profile_.steps.resize(static_cast<size_t>(max_steps));
    for (StepRecord& step : profile_.steps) {
      step.calls.resize(most);
      step.times.resize(most * static_cast<size_t>(threads));
    }
  } catch (const std::exception&) {  // bad_alloc, or length_error for an absurd count
    throw OutOfMemory("[profile] no memory for the records of " + std::to_string(max_steps) +
                      " steps");
  }
}

int64_t Recorder::now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

bool Recorder::has_room() {
  if (used_ < profile_.steps.size()) return true;
  ++profile_.dropped_steps;
  return false;
}

namespace {

// A member's times, one call after the other.
struct Stopwatch {
  CallTimes* times;
  int64_t now = Recorder::now_ns();
  void begin() { times->begin_ns = now; }
  void done() { times->done_ns = Recorder::now_ns(); }
  void end() {
    now = times->end_ns = Recorder::now_ns();
    ++times;
  }
};

}  // namespace

StepRecord& Recorder::start(const Step& step, size_t calls, int64_t begin_ns) {
  StepRecord& record = profile_.steps[used_];
  record.phase = step.batch->phase;
  record.tokens = step.layout.num_tokens;
  record.sequences = step.layout.num_sequences;
  record.begin_ns = begin_ns;
  record.cancelled = false;
  record.calls.resize(calls);
  record.times.resize(calls * static_cast<size_t>(profile_.threads));
  return record;
}

void Recorder::run(const Region& region, size_t program, ThreadPool& pool, int64_t begin_ns) {
  const std::span<const Call* const> calls = region.calls;
  StepRecord& step = start(region.step, calls.size(), begin_ns);
  // The closure refers to one object: a larger one would make std::function allocate.
  const struct {
    const Region& region;
    StepRecord& step;
  } both{region, step};
  pool.parallel([&both](Team& team) {
    const size_t first = static_cast<size_t>(team.rank()) * both.region.calls.size();
    both.region.run(team, Stopwatch{both.step.times.data() + first});
    if (team.rank() == 0) both.step.barriers = team.barriers();
  });
  step.end_ns = now_ns();
  step.cancelled = region.num_run() < calls.size();
  if (step.cancelled) drop_times(step, region.num_run());
  add_costs(step, program, calls);
  keep();
}

// Calls from `count` on did not run.
void Recorder::drop_times(StepRecord& step, size_t count) const {
  const size_t calls = step.calls.size();
  for (size_t thread = 0; thread < static_cast<size_t>(profile_.threads); ++thread) {
    const auto first = step.times.begin() + static_cast<ptrdiff_t>(thread * calls);
    std::fill(first + static_cast<ptrdiff_t>(count), first + static_cast<ptrdiff_t>(calls),
              CallTimes{step.end_ns, step.end_ns, step.end_ns});
  }
}

void Recorder::add_costs(StepRecord& step, size_t program,
                         std::span<const Call* const> calls) const {
  const auto& all = programs_[program].calls;
  size_t place = 0;
  for (size_t i = 0; i < calls.size(); ++i, ++place) {
    while (all[place].get() != calls[i]) ++place;
    const ops::Cost cost = calls[i]->cost();
    step.calls[i] = {static_cast<int32_t>(first_info_[program] + place), cost.bytes, cost.ops};
  }
}

Profile Recorder::take() {
  profile_.steps.resize(used_);
  return std::move(profile_);
}

}  // namespace effinfer::executor
