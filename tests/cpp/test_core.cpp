// The basics: shapes, dtypes, ISA levels, the thread pool.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <numeric>
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

// Seconds of a region with the barriers of a decoding step of 30 layers and 20 us of work between
// them, whoever does it; the least of several.
double region_seconds(ThreadPool& pool) {
  using Clock = std::chrono::steady_clock;
  const auto region = [&pool] {
    const Clock::time_point begin = Clock::now();
    pool.parallel([](Team& team) {
      for (int phase = 0; phase < 150; ++phase) {
        team.for_chunks(20, [](int64_t) {
          const Clock::time_point end = Clock::now() + std::chrono::microseconds(1);
          while (Clock::now() < end) continue;
        });
        team.barrier();
      }
    });
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  double least = region();
  for (int i = 0; i < 7; ++i) least = std::min(least, region());
  return least;
}

TEST("pool: no fewer threads than none") {
  CHECK_THROWS(InvalidArgument, "expected 0 (as many as fit) or more threads, got -1",
               ThreadPool(-1));
}

TEST("pool: eight threads asked for on one CPU cost no more than one") {
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
    ThreadPool single(1);
    ThreadPool many(8);
    CHECK_EQ(many.size(), 1);
    CHECK(many.reason().find("8 asked for, limited by the ") == 0);
    const double alone = region_seconds(single);
    const double together = region_seconds(many);
    CHECK(together < 1.3 * alone);
    ThreadPool exact(8, true);
    CHECK_EQ(exact.size(), 8);
    std::atomic<int> ran{0};
    exact.parallel([&](Team& team) {
      team.barrier();
      ++ran;
    });
    CHECK_EQ(ran.load(), 8);
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
