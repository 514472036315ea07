// Running row-parallel kernels on as many threads as they are worth.
#pragma once

#include "ops/registry.h"

namespace effinfer::ops {

// `pool`, or, where waking a team would take longer than the work of about `nanoseconds` on one
// thread, a pool of the calling thread alone.
ThreadPool& pool_for(int64_t nanoseconds, ThreadPool& pool);

// A kernel of a few operations an element: about 8 bytes a nanosecond on one thread.
template <class Problem>
void run_rows(const Problem& problem, ThreadPool& pool) {
  run_alone(problem, pool_for(cost(problem).bytes / 8, pool));
}
template <class Problem>
void run_rows(const Problem& problem, const Executor& executor) {
  if (executor.pool() != nullptr) return run_rows(problem, *executor.pool());
  run_alone(problem, executor);
}

}  // namespace effinfer::ops
