// What a GPU does not launch, and accesses that it does not do: the emulator refuses them.
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "cpp/check.h"
#include "gpu/device_arrays.h"
#include "gpu/host_unit.h"

namespace effinfer::cuda {
namespace {

using Eight [[gnu::may_alias]] = uint64_t;

// Adds one to 8 bytes of shared and of global memory.
struct AddOne {
  static constexpr const char* kName = "add_one";
  static constexpr int kThreads = 64;
  struct Params {
    char* global;
    int global_at;
    int shared_at;
  };
  struct Shared {
    alignas(8) char bytes[24];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (unit.thread > 0) return;
    auto* const own = reinterpret_cast<Eight*>(shared.bytes + p.shared_at);
    *own = 1;
    *reinterpret_cast<Eight*>(p.global + p.global_at) += *own;
  }
};

void add_one(int global_at, int shared_at, int threads = AddOne::kThreads) {
  const DeviceArray<char> global(std::vector<char>(24));
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  host::enqueue<AddOne>({global.data(), global_at, shared_at}, 1, *queue, sizeof(AddOne::Shared),
                        threads);
  queue->wait();
}

TEST("a launch has as many threads as its kernel takes, and whole warps") {
  add_one(8, 8);
  add_one(8, 8, 32);
  CHECK_THROWS(std::logic_error, "[add_one] expected whole warps, at most 64 threads, got 96",
               add_one(8, 8, 96));
  CHECK_THROWS(std::logic_error, "at most 64 threads, got 40", add_one(8, 8, 40));
  CHECK_THROWS(std::logic_error, "at most 64 threads, got 0", add_one(8, 8, 0));
}

TEST("what is read or written lies at a multiple of its type's alignment") {
  if (host::detected_races() != host::Races::all) check::skip("no access is seen");
  constexpr const char* kRefused = "thread 0 takes what is no multiple of 8 for an address";
  add_one(16, 0);
  CHECK_THROWS(std::logic_error, kRefused, add_one(4, 8));
  CHECK_THROWS(std::logic_error, kRefused, add_one(8, 12));
}

}  // namespace
}  // namespace effinfer::cuda

CHECK_MAIN()
