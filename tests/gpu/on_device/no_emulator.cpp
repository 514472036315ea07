// What tests ask of the emulator, where the kernels run on a GPU: it has none of it, and tests that
// cannot do without are skipped. In place of in_emulator.cpp and of what else tests call.
#include <functional>
#include <string>
#include <vector>

#include "core/backend.h"
#include "cpp/check.h"
#include "gpu/device_arrays.h"
#include "gpu/hopper_device.h"
#include "gpu/host_backend.h"
#include "gpu/host_unit.h"
#include "gpu/mutations.h"
#include "gpu/observer.h"
#include "gpu/replays.h"

namespace effinfer {

OnHopper::OnHopper(int) {
  if (!is_possible()) check::skip("needs compute capability 9.0");
}

OnHopper::~OnHopper() = default;

bool OnHopper::is_possible() {
  return current_target(kGpu).arch == 90;
}

Replays::Replays() : before_(0) {}

void Replays::expect_at_least(int64_t) const {}

void Replays::expect_at_most(int64_t) const {}

std::vector<cuda::host::Site> needless_barriers(const std::function<bool()>& run_and_check, int) {
  CHECK(run_and_check());
  return {};
}

void expect_every_barrier_matters(const std::function<bool()>& run_and_check, int) {
  CHECK(run_and_check());
  check::skip("barriers are left out in the emulator only");
}

void expect_reached(const std::function<void()>& run, const std::string&, const std::string&,
                    bool) {
  run();  // what a kernel does is not seen
}

}  // namespace effinfer

namespace effinfer::cuda::host {

Races detected_races() {
  return Races::none;
}

Banks count_banks(const std::function<void()>&) {
  check::skip("conflicts of banks are counted in the emulator only");
}

void set_memory(const MemoryFacts&) {
  check::skip("the device's memory is what it is");
}

void record_prefetches() {
  check::skip("what is prefetched is seen in the emulator only");
}

std::vector<Prefetched> recorded_prefetches() {
  return {};
}

int64_t shared_bytes() {
  return 0;
}

void set_multiprocessors(int) {
  check::skip("the device's multiprocessors are what they are");
}

void set_shared_bytes(int64_t) {
  check::skip("the device's shared memory is what it is");
}

}  // namespace effinfer::cuda::host
