// Takes the times of a step's calls. All memory is taken when it is made: a recorded step allocates
// as little as any other.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "effinfer/profile.h"
#include "executor/call.h"
#include "executor/program.h"

namespace effinfer::executor {

class Recorder {
 public:
  // `more` are calls that follow those of a program on a GPU. Throws OutOfMemory.
  Recorder(const std::string& device, int threads, int32_t num_layers,
           std::span<const Program> programs, std::span<const CallInfo> more, int64_t max_steps);

  static int64_t now_ns();
  // Whether there is room for one more step; counts those for which there is none.
  bool has_room();
  // Runs the calls of the region, which are some of those of the program, and records them.
  // `begin_ns` is when the step began.
  void run(const Region& region, size_t program, ThreadPool& pool, int64_t begin_ns);
  // The record of a step, for which there is room, of at most so many calls: it counts when it is
  // kept, with as many as it has then.
  StepRecord& start(const Step& step, size_t calls, int64_t begin_ns);
  void keep() { ++used_; }
  // The number in Profile::calls of a program's first call, and of the first of `more`.
  size_t first_info(size_t program) const { return first_info_[program]; }
  size_t first_more() const { return first_more_; }
  Profile take();

 private:
  void drop_times(StepRecord& step, size_t count) const;
  void add_costs(StepRecord& step, size_t program, std::span<const Call* const> calls) const;

  std::span<const Program> programs_;
  std::vector<size_t> first_info_;  // of each program, in Profile::calls
  size_t first_more_ = 0;
  Profile profile_;
  size_t used_ = 0;  // steps of the profile that are recorded
};

}  // namespace effinfer::executor
