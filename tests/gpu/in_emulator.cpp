// What tests ask of the machine that runs their kernels, where that is the emulator. On a GPU
// on_device/no_emulator.cpp is in its place.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "cpp/check.h"
#include "gpu/child.h"
#include "gpu/hopper_device.h"
#include "gpu/host_backend.h"
#include "gpu/host_unit.h"
#include "gpu/mutations.h"
#include "gpu/replays.h"

namespace effinfer {

OnHopper::OnHopper(int multiprocessors) {
  cuda::host::set_arch(90);
  cuda::host::set_multiprocessors(multiprocessors);
}

OnHopper::~OnHopper() {
  cuda::host::set_arch(80);
  cuda::host::set_multiprocessors(132);
}

bool OnHopper::is_possible() {
  return true;
}

Replays::Replays() : before_(cuda::host::num_replays()) {}

void Replays::expect_at_least(int64_t count) const {
  CHECK(cuda::host::num_replays() - before_ >= count);
}

void Replays::expect_at_most(int64_t count) const {
  CHECK(cuda::host::num_replays() - before_ <= count);
}

std::vector<cuda::host::Site> needless_barriers(const std::function<bool()>& run_and_check,
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

void expect_every_barrier_matters(const std::function<bool()>& run_and_check,
                                  [[maybe_unused]] int seeds) {
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

void expect_reached(const std::function<void()>& run, const std::string& kernel,
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
