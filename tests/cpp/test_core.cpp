// The basics: shapes, dtypes, ISA levels, the thread pool.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "check.h"
#include "effinfer/device.h"
#include "effinfer/dtype.h"
#include "effinfer/error.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"

using namespace effinfer;

TEST("dims: element counts and overflow") {
  CHECK_EQ((Dims{2, 3, 4}).num_elements(), 24);
  CHECK_EQ(Dims{}.num_elements(), 1);
  CHECK_EQ((Dims{5, 0}).num_elements(), 0);
  const int64_t big = std::numeric_limits<int64_t>::max() / 2;
  CHECK_THROWS(InvalidArgument, "[tensor]", (Dims{big, 3}).num_elements());
  CHECK_THROWS(InvalidArgument, "at most 5", (Dims{1, 1, 1, 1, 1, 1}));
}

TEST("dtypes: names round trip, block sizes") {
  for (int i = 0; i < kNumDTypes; ++i) {
    const DType dtype = static_cast<DType>(i);
    CHECK(parse_dtype(name(dtype)) == dtype);
  }
  CHECK_THROWS(InvalidArgument, "q4_1", parse_dtype("q9"));
  const TensorView view{nullptr, DType::q4_1, Dims{2, 64}};
  CHECK_EQ(view.num_bytes(), 80u);
  CHECK_THROWS(InvalidArgument, "multiple of 32",
               (TensorView{nullptr, DType::q4_1, Dims{2, 33}}.num_bytes()));
}

TEST("isa: levels are ordered, a missing one is refused") {
  const std::vector<Isa> levels = available_isas();
  CHECK(levels.front() == Isa::portable);
  CHECK(levels.back() == cpu_features().best);
  CHECK_THROWS(InvalidArgument, "portable", parse_isa("sse9"));
  if (levels.back() != Isa::amx) CHECK_THROWS(Unsupported, "best level", set_isa(Isa::amx));
}

TEST("pool: every chunk is claimed once, in each of many phases") {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads, true);
    constexpr int kPhases = 200;
    constexpr int kChunks = 37;
    std::vector<std::atomic<int>> hits(kPhases * kChunks);
    std::atomic<int> late{0};
    pool.parallel([&](Team& team) {
      for (int phase = 0; phase < kPhases; ++phase) {
        team.for_chunks(
            kChunks, [&](int64_t chunk) { ++hits[static_cast<size_t>(phase * kChunks + chunk)]; });
        team.barrier();
        // After the barrier the whole phase is visible to everyone.
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          if (hits[static_cast<size_t>(phase * kChunks + chunk)] != 1) ++late;
        }
      }
    });
    CHECK_EQ(late.load(), 0);
    CHECK_EQ(pool.size(), threads);
  }
}

TEST("pool: an exception reaches the caller and the pool goes on") {
  ThreadPool pool(2);
  CHECK_THROWS(InvalidArgument, "member", pool.parallel([](Team& team) {
    if (team.rank() == 1) throw InvalidArgument("member");
  }));
  std::atomic<int> ran{0};
  pool.parallel([&](Team&) { ++ran; });
  CHECK_EQ(ran.load(), 2);
}

TEST("pool: scratch is private, aligned and as large as reserved") {
  ThreadPool pool(3, true);
  pool.reserve_scratch(1000);
  std::vector<void*> scratch(3);
  pool.parallel([&](Team& team) {
    scratch[static_cast<size_t>(team.rank())] = team.scratch();
    std::fill_n(static_cast<char*>(team.scratch()), team.scratch_bytes(), char(team.rank()));
  });
  CHECK(scratch[0] != scratch[1] && scratch[1] != scratch[2]);
  for (void* pointer : scratch) CHECK_EQ(reinterpret_cast<uintptr_t>(pointer) % 64, 0u);
}

TEST("pool: no fewer threads than none") {
  CHECK_THROWS(InvalidArgument, "expected 0 (as many as fit) or more threads, got -1",
               ThreadPool(-1));
}

// How many run a region, and how many of them are other threads than the caller's.
struct Members {
  int all = 0;
  int others = 0;
};

Members members_of(ThreadPool& pool) {
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> all{0};
  std::atomic<int> others{0};
  pool.parallel([&](Team& team) {
    team.barrier();
    ++all;
    if (std::this_thread::get_id() != caller) ++others;
  });
  return {all, others};
}

// Members that share a CPU wait for each other at every barrier: no more are made than CPUs are
// there, unless exactly so many were asked for.
TEST("pool: eight threads asked for on one CPU are the caller alone") {
  cpu_set_t before;
  CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &before)) continue;
    CPU_SET(cpu, &one);
    break;
  }
  CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  {
    ThreadPool many(8);
    CHECK_EQ(many.size(), 1);
    CHECK(many.reason().find("8 asked for, limited by the ") == 0);
    CHECK_EQ(members_of(many).all, 1);
    CHECK_EQ(members_of(many).others, 0);
    ThreadPool exact(8, true);
    CHECK_EQ(exact.size(), 8);
    CHECK_EQ(members_of(exact).all, 8);
    CHECK_EQ(members_of(exact).others, 7);
  }
  CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

TEST("pool: a caller's own dispatcher") {
  struct Serial : Dispatcher {
    int threads() const override { return 1; }
    void dispatch(void (*task)(void*, int), void* context) override { task(context, 0); }
  };
  ThreadPool pool(std::make_shared<Serial>());
  int ran = 0;
  pool.parallel([&](Team& team) {
    team.for_chunks(5, [&](int64_t) { ++ran; });
    team.barrier();
  });
  CHECK_EQ(ran, 5);
  CHECK_THROWS(InvalidArgument, "dispatcher", ThreadPool(std::shared_ptr<Dispatcher>()));
}

CHECK_MAIN()
