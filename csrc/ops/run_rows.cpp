#include "ops/run_rows.h"

namespace effinfer::ops {

ThreadPool& pool_for(int64_t nanoseconds, ThreadPool& pool) {
  // A sleeping worker takes 5 to 50 us to wake.
  constexpr int64_t kTeamNanoseconds = 10'000;
  if (nanoseconds > kTeamNanoseconds || pool.size() == 1) return pool;
  static thread_local ThreadPool alone(1);
  return alone;
}

}  // namespace effinfer::ops
