// Whether a kernel needs each of its barriers: runs it with one left out after the other. (A GPU
// leaves none out: there it runs as it is.)
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cpp/check.h"
#if !defined(__CUDACC__)
#include "gpu/host_unit.h"  // Site, Races, Banks
#endif

namespace effinfer {

#if !defined(__CUDACC__)
// The calls of sync, sync_warp, commit, wait and fence without which `run_and_check`, which says
// whether what it ran is right, says so under `seeds` seeds all the same. A fence shows only where
// all races are detected.
std::vector<cuda::host::Site> needless_barriers(const std::function<bool()>& run_and_check,
                                                int seeds);
#endif

void expect_every_barrier_matters(const std::function<bool()>& run_and_check, int seeds = 20);

// Whether launches of `kernel` by `run` call `what`, one of those above or of Hopper's.
void expect_reached(const std::function<void()>& run, const std::string& kernel,
                    const std::string& what, bool reached);

}  // namespace effinfer
