// What a GPU does not launch, and accesses that it does not do: the emulator refuses them.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/check.h"
#include "gpu/device_arrays.h"
#include "gpu/fiber.h"
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

// Where each thread's frame lies.
struct TellFrame {
  static constexpr const char* kName = "tell_frame";
  static constexpr int kThreads = 64;
  struct Params {
    uintptr_t* frames;
  };
  struct Shared {};
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    p.frames[unit.thread] = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  }
};

// What the process has mapped.
struct Mapping {
  uintptr_t begin;
  uintptr_t end;
  bool is_nobodys;
};

std::vector<Mapping> mappings() {
  std::ifstream maps("/proc/self/maps");
  std::vector<Mapping> all;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    Mapping mapping{};
    char dash;
    std::string rights;
    fields >> std::hex >> mapping.begin >> dash >> mapping.end >> rights;
    mapping.is_nobodys = rights.starts_with("---");
    all.push_back(mapping);
  }
  return all;
}

TEST("an access near a stack is to the stack: nothing else lies there") {
  const DeviceArray<uintptr_t> frames(TellFrame::kThreads);
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  host::enqueue<TellFrame>({frames.data()}, 1, *queue, 0);
  queue->wait();
  const std::vector<Mapping> all = mappings();
  for (const uintptr_t frame : frames.values()) {
    const auto own = std::ranges::find_if(
        all, [&](const Mapping& mapping) { return mapping.begin <= frame && frame < mapping.end; });
    CHECK(all.end() - own >= 2);
    if (all.end() - own < 2) return;
    CHECK(own->end - own->begin <= host::Fiber::kStackBytes);
    CHECK(own[1].is_nobodys && own[1].begin == own->end);
    CHECK(own[1].end >= frame + host::Fiber::kStackBytes);
  }
}

}  // namespace
}  // namespace effinfer::cuda

CHECK_MAIN()
