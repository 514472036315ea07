// What tests ask of the emulator, where the kernels run on a GPU: it has none of it, and tests that
// cannot do without are skipped.
#include "cpp/check.h"
#include "gpu/host_backend.h"
#include "gpu/host_unit.h"
#include "gpu/observer.h"

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

void set_shared_bytes(int64_t) {
  check::skip("the device's shared memory is what it is");
}

}  // namespace effinfer::cuda::host
