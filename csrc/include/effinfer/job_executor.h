// A part of the machine with a thread of its own: jobs run there one after the other, beside
// whatever their submitter does.
//
//   JobExecutor executor(parse_placement("cpu:1"));
//   const Ticket ticket = executor.submit([&](const CancelToken& cancel) {
//     executable->run(batch, cache, logits, &cancel);
//   });
//   ticket.cancel();  // the job throws Cancelled after the kernel that it is in
#pragma once

#include <functional>
#include <memory>

#include "effinfer/cancel.h"
#include "effinfer/export.h"
#include "effinfer/placement.h"
#include "effinfer/threads.h"

namespace effinfer {

// A job that was submitted.
class EFFINFER_API Ticket {
 public:
  Ticket() = default;  // of no job: it has ended
  bool has_ended() const;
  // Until it has ended. Throws what the job threw, each time; Cancelled where it was cancelled
  // before it began.
  void wait() const;
  void cancel() const;

 private:
  friend class JobExecutor;
  struct State;
  std::shared_ptr<State> state_;
};

class EFFINFER_API JobExecutor {
 public:
  using Job = std::function<void(const CancelToken&)>;

  // Its thread, and the pool's, are pinned to the placement's cores. Throws InvalidArgument for a
  // device that this build lacks and for cores that the process may not use.
  explicit JobExecutor(const Placement& placement);
  // Cancels all jobs and waits for the one that runs.
  ~JobExecutor();
  JobExecutor(const JobExecutor&) = delete;
  JobExecutor& operator=(const JobExecutor&) = delete;

  const Placement& placement() const;
  // For its jobs, whose thread is the first member; on a GPU, for what the host does.
  const std::shared_ptr<ThreadPool>& pool() const;
  // Runs after what was submitted before. The job is given the token of its ticket.
  Ticket submit(Job job);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace effinfer
