#include "compiler/recorder.h"

#include <chrono>
#include <new>

namespace effinfer::compiler {

Recorder::Recorder(int threads, int32_t num_layers, std::span<const Program> programs,
                   int64_t max_steps)
    : programs_(programs) {
  profile_.threads = threads;
  profile_.num_layers = num_layers;
  size_t most = 0;
  for (const Program& program : programs) {
    first_info_.push_back(profile_.calls.size());
    profile_.calls.insert(profile_.calls.end(), program.infos.begin(), program.infos.end());
    most = std::max(most, program.calls.size());
  }
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

void Recorder::run(const Batch& batch, size_t program, std::span<const Call* const> calls,
                   ThreadPool& pool, int64_t begin_ns) {
  StepRecord& step = profile_.steps[used_];
  step.phase = batch.phase;
  step.tokens = static_cast<int64_t>(batch.token_ids.size());
  step.sequences = static_cast<int64_t>(batch.kv_len.size());
  step.begin_ns = begin_ns;
  step.calls.resize(calls.size());
  step.times.resize(calls.size() * static_cast<size_t>(profile_.threads));
  // By reference to one object: a larger closure would make std::function allocate.
  const struct {
    std::span<const Call* const> calls;
    StepRecord& step;
  } region{calls, step};
  pool.parallel([&region](Team& team) {
    CallTimes* times =
        region.step.times.data() + static_cast<size_t>(team.rank()) * region.calls.size();
    int64_t now = now_ns();
    for (const Call* call : region.calls) {
      times->begin_ns = now;
      call->run(team);
      times->done_ns = now_ns();
      team.barrier();
      now = times->end_ns = now_ns();
      ++times;
    }
    if (team.rank() == 0) region.step.barriers = team.barriers();
  });
  step.end_ns = now_ns();
  add_costs(step, program, calls);
  ++used_;
}

void Recorder::add_costs(StepRecord& step, size_t program,
                         std::span<const Call* const> calls) const {
  const auto& all = programs_[program].calls;
  size_t place = 0;
  for (size_t i = 0; i < calls.size(); ++i, ++place) {
    while (all[place].get() != calls[i]) ++place;
    const kernels::Cost cost = calls[i]->cost();
    step.calls[i] = {static_cast<int32_t>(first_info_[program] + place), cost.bytes, cost.ops};
  }
}

Profile Recorder::take() {
  profile_.steps.resize(used_);
  return std::move(profile_);
}

}  // namespace effinfer::compiler
