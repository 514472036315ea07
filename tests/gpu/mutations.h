// Whether a kernel needs each of its barriers: runs it with one left out after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "cpp/check.h"
#include "gpu/child.h"
#include "gpu/host_backend.h"
#include "gpu/host_unit.h"

namespace effinfer {

// The calls of sync, sync_warp, commit, wait and fence without which `run_and_check`, which says
// whether what it ran is right, says so under `seeds` seeds all the same. A fence shows only where
// all races are detected.
inline std::vector<cuda::host::Site> needless_barriers(const std::function<bool()>& run_and_check,
                                                       int seeds) {
  // Races are seen whatever the order of threads.
  constexpr int kEnoughForRaces = 4;
  if (cuda::host::detected_races() != cuda::host::Races::none) {
    seeds = std::min(seeds, kEnoughForRaces);
  }
  const auto right = [&] {
    for (int seed = 1; seed <= seeds; ++seed) {
      cuda::host::set_seed(static_cast<uint64_t>(seed) << 32);
      if (!run_and_check()) return false;
    }
    return true;
  };
  cuda::host::record_sites();
  const bool right_as_it_is = right();
  const std::set<cuda::host::Site> sites = cuda::host::recorded_sites();
  if (!right_as_it_is) check::fail(__FILE__, __LINE__, "wrong with all barriers in place");
  if (sites.empty()) check::fail(__FILE__, __LINE__, "no barrier was reached");
  std::vector<cuda::host::Site> needless;
  for (const cuda::host::Site& site : sites) {
    if (site.what == "fence" && cuda::host::detected_races() != cuda::host::Races::all) continue;
    const Child without = run_child([&] {
      cuda::host::ignore_site(site);
      return right();
    });
    if (without.succeeded()) needless.push_back(site);
  }
  return needless;
}

inline void expect_every_barrier_matters(const std::function<bool()>& run_and_check,
                                         [[maybe_unused]] int seeds = 20) {
#if defined(__SANITIZE_ADDRESS__)
  // Memory is watched here; what a missing barrier does is for other builds.
  if (!run_and_check()) check::fail(__FILE__, __LINE__, "wrong with all barriers in place");
#else
  for (const cuda::host::Site& site : needless_barriers(run_and_check, seeds)) {
    check::fail(site.file.c_str(), static_cast<int>(site.line),
                "[" + site.kernel + "] nothing shows that " + site.what + " is missing");
  }
#endif
}

// Whether launches of `kernel` by `run` call `what`, one of those above or of Hopper's.
inline void expect_reached(const std::function<void()>& run, const std::string& kernel,
                           const std::string& what, bool reached) {
  cuda::host::record_sites();
  run();
  const std::set<cuda::host::Site> sites = cuda::host::recorded_sites();
  const bool found = std::ranges::any_of(sites, [&](const cuda::host::Site& site) {
    return site.kernel == kernel && site.what == what;
  });
  CHECK_EQ(found, reached);
}

}  // namespace effinfer
