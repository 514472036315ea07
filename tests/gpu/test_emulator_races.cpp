// Barriers of a kernel: each that is missing must be noticed by a wrong result, an error or the
// detection of races, and none where all are in place.
#include <cmath>
#include <cstdlib>
#include <string>

#include "core/float16.h"
#include "cpp/arrays.h"
#include "cpp/check.h"
#include "gpu/child.h"
#include "gpu/device_arrays.h"
#include "gpu/host_backend.h"
#include "gpu/host_unit.h"
#include "gpu/mutations.h"

namespace effinfer::cuda {
namespace {

constexpr int kSeeds = 20;

enum class Bug {
  none,
  no_first_sync,   // others' copies have not landed when they are read
  no_second_sync,  // they are read when the next ones are on their way
  no_wait,
  waits_too_little,
  needless_sync,
};

// y[16, n] = x[16, k] w[n, k]^T in bfloat16: four warps of 8 columns each, with two buffers.
template <Bug kBug>
struct Pipelined {
  static constexpr const char* kName = "pipelined";
  static constexpr int kThreads = 128;
  static constexpr int kRows = 16;
  static constexpr int kCols = 32;
  static constexpr int kTile = 64;
  struct Params {
    const uint16_t* x;
    const uint16_t* w;
    float* y;
    int k;
    int n;
  };
  struct Shared {
    // Rows 144 bytes apart lie in different banks.
    alignas(16) uint16_t x[2][kRows][kTile + 8];
    alignas(16) uint16_t w[2][kCols][kTile + 8];
  };

  template <class Unit>
  EFFINFER_DEVICE static void fetch(Unit& unit, const Params& p, Shared& shared, int stage,
                                    int from) {
    const int col = unit.block * kCols;
    for (int i = unit.thread; i < kRows * 8; i += kThreads) {
      unit.copy_async(&shared.x[stage][i / 8][i % 8 * 8], p.x + i / 8 * p.k + from + i % 8 * 8);
    }
    for (int i = unit.thread; i < kCols * 8; i += kThreads) {
      unit.copy_async(&shared.w[stage][i / 8][i % 8 * 8],
                      p.w + (col + i / 8) * p.k + from + i % 8 * 8);
    }
    unit.commit();
  }

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    float d[4] = {};
    fetch(unit, p, shared, 0, 0);
    const int steps = p.k / kTile;
    for (int step = 0; step < steps; ++step) {
      const int stage = step % 2;
      if (step + 1 < steps) {
        fetch(unit, p, shared, 1 - stage, (step + 1) * kTile);
        if (kBug != Bug::no_wait) unit.template wait<kBug == Bug::waits_too_little ? 2 : 1>();
      } else {
        unit.template wait<0>();
      }
      if (kBug != Bug::no_first_sync) unit.sync();
      if (kBug == Bug::needless_sync) unit.sync();
      for (int k = 0; k < kTile; k += 16) {
        uint32_t a[4];
        uint32_t b[4];
        unit.ldmatrix(a, &shared.x[stage][unit.lane % 16][k + unit.lane / 16 * 8]);
        unit.ldmatrix(b,
                      &shared.w[stage][unit.warp * 8 + unit.lane % 8][k + unit.lane / 8 % 2 * 8]);
        unit.mma(d, a, {b[0], b[1]});
      }
      if (kBug != Bug::no_second_sync) unit.sync();
    }
    float* y = p.y + unit.lane / 4 * p.n + unit.block * kCols + unit.warp * 8 + unit.lane % 4 * 2;
    for (int i = 0; i < 4; ++i) y[i / 2 * 8 * p.n + i % 2] = d[i];
  }
};

// One product, by any of them.
class Case {
 public:
  Case() {
    std::mt19937 random(1);
    x_ = numbers(16 * kDepth, random);
    w_ = numbers(kCols * kDepth, random);
    x_there_ = DeviceArray<uint16_t>(x_);
    w_there_ = DeviceArray<uint16_t>(w_);
    for (size_t row = 0; row < 16; ++row) {
      for (size_t col = 0; col < kCols; ++col) {
        double sum = 0;
        for (size_t k = 0; k < kDepth; ++k) {
          sum += double{bf16_to_f32(x_[row * kDepth + k])} * bf16_to_f32(w_[col * kDepth + k]);
        }
        expected_.push_back(sum);
      }
    }
  }

  template <Bug kBug>
  std::vector<float> run() const {
    const DeviceArray<float> y(16 * kCols);
    const std::unique_ptr<Queue> queue = make_queue(kGpu);
    host::enqueue<Pipelined<kBug>>({x_there_.data(), w_there_.data(), y.data(), kDepth, kCols},
                                   kCols / 32, *queue);
    queue->wait();
    return y.values();
  }
  bool is_right(const std::vector<float>& y) const {
    for (size_t i = 0; i < y.size(); ++i) {
      if (!(std::abs(y[i] - expected_[i]) < 1e-4)) return false;  // NaN as well
    }
    return true;
  }

 private:
  static constexpr int kDepth = 256;
  static constexpr int kCols = 64;
  static std::vector<uint16_t> numbers(int count, std::mt19937& random) {
    std::vector<uint16_t> out;
    for (const float x : normals(count, random)) out.push_back(f32_to_bf16(x));
    return out;
  }
  std::vector<uint16_t> x_;
  std::vector<uint16_t> w_;
  std::vector<double> expected_;
  DeviceArray<uint16_t> x_there_;
  DeviceArray<uint16_t> w_there_;
};

TEST("a correct kernel gives the same bits in any order of threads") {
  const Case product;
  host::set_seed(1);
  const std::vector<float> first = product.run<Bug::none>();
  CHECK(product.is_right(first));
  for (int seed = 2; seed <= kSeeds; ++seed) CHECK(product.run<Bug::none>() == first);
  CHECK(product.run<Bug::needless_sync>() == first);
}

// How many of the seeds notice it. Without the detection of races by the result or an error alone.
template <Bug kBug>
int noticed(const Case& product) {
  int count = 0;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    count += !run_child([&] {
                host::set_seed(static_cast<uint64_t>(seed));
                return product.is_right(product.run<kBug>());
              }).succeeded();
  }
  return count;
}

TEST("planted bugs show under most seeds") {
  const Case product;
  CHECK_EQ(noticed<Bug::none>(product), 0);
  CHECK(noticed<Bug::no_first_sync>(product) > kSeeds * 3 / 4);
  CHECK(noticed<Bug::no_second_sync>(product) > kSeeds * 3 / 4);
  CHECK_EQ(noticed<Bug::no_wait>(product), kSeeds);
  CHECK_EQ(noticed<Bug::waits_too_little>(product), kSeeds);
}

TEST("barriers that nothing needs") {
  const Case product;
  expect_every_barrier_matters([&] { return product.is_right(product.run<Bug::none>()); });
  const std::vector<host::Site> needless = needless_barriers(
      [&] { return product.is_right(product.run<Bug::needless_sync>()); }, kSeeds);
  // Either of two that follow each other.
  CHECK_EQ(needless.size(), 2u);
  for (const host::Site& site : needless) {
    CHECK_EQ(site.kernel, "pipelined");
    CHECK_EQ(site.what, "sync");
    CHECK(site.file.find("test_emulator_races.cpp") != std::string::npos);
  }
}

constexpr int kRacingBlocks = 3;

// What the threads of two warps do, over numbers in shared and in global memory.
template <class F>
struct Racing {
  static constexpr const char* kName = "racing";
  static constexpr int kThreads = 64;
  struct Params {
    F body;
    int* global;
  };
  struct Shared {
    alignas(16) int numbers[64];
    uint8_t bytes[64];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    p.body(unit, shared, p.global);
  }
};

template <class F>
std::vector<int> run_racing(F body) {
  const DeviceArray<int> global(std::vector<int>(1024));
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  host::enqueue<Racing<F>>({body, global.data()}, kRacingBlocks, *queue);
  queue->wait();
  return global.values();
}

template <class F>
bool races(F body) {
  return !run_child([&] { return !run_racing(body).empty(); }).succeeded();
}

void skip_without_detection(host::Races needed = host::Races::of_block) {
  if (host::detected_races() < needed) check::skip("kernels are not built for it");
}

TEST("races in shared memory") {
  skip_without_detection();
  // A thread's own, then others' after a barrier of the block.
  CHECK(!races([](auto& unit, auto& shared, int*) {
    shared.numbers[unit.thread] = unit.thread;
    ++shared.numbers[unit.thread];
    unit.sync();
    const int sum = shared.numbers[(unit.thread + 37) % 64] + shared.numbers[5];
    unit.sync();
    shared.numbers[unit.thread] = sum;
  }));
  // Reading what another warp may still write; with a barrier of warps only.
  CHECK(races([](auto& unit, auto& shared, int*) {
    shared.numbers[unit.thread] = unit.thread;
    unit.sync_warp();
    unit.shfl(shared.numbers[63 - unit.thread], 0);
  }));
  // Writing what another thread of the same warp may still read.
  CHECK(races([](auto& unit, auto& shared, int*) {
    shared.numbers[unit.thread] = unit.thread;
    unit.sync();
    const int other = shared.numbers[unit.thread ^ 1];
    shared.numbers[unit.thread] = other;
  }));
  CHECK(!races([](auto& unit, auto& shared, int*) {
    shared.numbers[unit.thread] = unit.thread;
    unit.sync_warp();
    const int other = shared.numbers[unit.thread ^ 1];
    unit.sync_warp();
    shared.numbers[unit.thread] = other;
  }));
  // A shuffle is no barrier for memory.
  CHECK(races([](auto& unit, auto& shared, int*) {
    shared.numbers[unit.thread] = unit.thread;
    unit.shfl_xor(1, 1);
    unit.shfl(shared.numbers[unit.thread ^ 1], 0);
  }));
  // Two that write; neighbours that share a word do not race.
  CHECK(races([](auto& unit, auto& shared, int*) { shared.numbers[unit.lane] = 0; }));
  CHECK(!races([](auto& unit, auto& shared, int*) { shared.bytes[unit.thread] = 0; }));
}

TEST("races with add_shared") {
  skip_without_detection(host::Races::all);
  // Zeroes, adds and reads, each maybe behind a barrier.
  const auto count = [](auto& unit, auto& shared, bool zeroed, bool added) {
    shared.numbers[unit.thread] = 0;
    if (zeroed) unit.sync();
    unit.add_shared(reinterpret_cast<uint32_t*>(&shared.numbers[unit.thread % 5]), 1);
    if (added) unit.sync();
    unit.shfl(shared.numbers[unit.thread % 7], 0);
  };
  CHECK(!races([&](auto& unit, auto& shared, int*) { count(unit, shared, true, true); }));
  CHECK(races([&](auto& unit, auto& shared, int*) { count(unit, shared, false, true); }));
  CHECK(races([&](auto& unit, auto& shared, int*) { count(unit, shared, true, false); }));
}

TEST("races with asynchronous copies") {
  skip_without_detection();
  const auto copy = [](auto& unit, auto& shared, int* global) {
    if (unit.thread < 16) unit.copy_async(&shared.numbers[unit.thread * 4], global);
    unit.commit();
  };
  CHECK(!races([=](auto& unit, auto& shared, int* global) {
    copy(unit, shared, global);
    unit.template wait<0>();
    unit.sync();
    unit.shfl(shared.numbers[unit.thread], 0);
  }));
  CHECK(races([=](auto& unit, auto& shared, int* global) {
    copy(unit, shared, global);
    unit.sync();
    unit.template wait<0>();
    unit.shfl(shared.numbers[unit.thread], 0);
  }));
  CHECK(races([=](auto& unit, auto& shared, int* global) {
    unit.shfl(shared.numbers[unit.thread], 0);
    copy(unit, shared, global);
    unit.template wait<0>();
  }));
}

// The last block to come adds up what each has written.
template <bool kReleases, bool kAcquires>
void add_up(auto& unit, auto& shared, int* global) {
  global[unit.block * 64 + unit.thread] = unit.thread;
  unit.sync();
  if (unit.thread == 0) {
    if (kReleases) unit.fence();
    shared.numbers[0] = unit.atomic_add(&global[1000], 1);
    if (kAcquires) unit.fence();
  }
  unit.sync();
  if (shared.numbers[0] < kRacingBlocks - 1) return;
  for (int block = 0; block < kRacingBlocks; ++block) {
    global[512 + unit.thread] += global[block * 64 + 63 - unit.thread];
  }
}

TEST("races between blocks") {
  skip_without_detection(host::Races::all);
  CHECK(!races(
      [](auto& unit, auto& shared, int* global) { add_up<true, true>(unit, shared, global); }));
  CHECK(races(
      [](auto& unit, auto& shared, int* global) { add_up<false, true>(unit, shared, global); }));
  CHECK(races(
      [](auto& unit, auto& shared, int* global) { add_up<true, false>(unit, shared, global); }));
  CHECK(races([](auto& unit, auto&, int* global) { global[unit.thread] = unit.block; }));
  CHECK(!races([](auto& unit, auto&, int* global) { unit.atomic_add(&global[unit.lane], 1); }));
}

TEST("every barrier and fence of a sum over blocks matters") {
  skip_without_detection(host::Races::all);
  expect_every_barrier_matters([] {
    const std::vector<int> global = run_racing(
        [](auto& unit, auto& shared, int* numbers) { add_up<true, true>(unit, shared, numbers); });
    bool right = true;
    for (int i = 0; i < 64; ++i) right = right && global[512 + i] == kRacingBlocks * (63 - i);
    return right;
  });
}

TEST("load() of what the launch itself writes") {
  skip_without_detection(host::Races::all);
  CHECK(!races([](auto& unit, auto&, int* global) {
    const int before = unit.load(&global[unit.block * 64 + unit.thread]);
    global[unit.block * 64 + unit.thread] = before + 1;
  }));
  CHECK(races([](auto& unit, auto&, int* global) {
    global[unit.block * 64 + unit.thread] = 1;
    unit.sync();
    unit.load(&global[unit.block * 64 + unit.thread]);
  }));
}

// Cycles of what one warp does.
template <class F>
uint64_t bank_cycles(F body) {
  return host::count_banks([&] {
           run_racing([&](auto& unit, auto& shared, int*) {
             if (unit.block == 0 && unit.warp == 0) body(unit, shared.numbers);
           });
         })
      .cycles;
}

enum class When : uint8_t { behind_the_wait, loads_early, reads_early, writes_early };

// Adds one to a number, where and when it is told.
template <class Number>
struct AddsOne {
  static constexpr const char* kName = "adds_one";
  static constexpr int kThreads = 32;
  static constexpr bool kWaitsItself = true;
  struct Params {
    const Number* from;
    Number* to;
    When when;
  };
  struct Shared {};
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    if (p.when == When::writes_early && unit.thread == 0) *p.to = 0;
    Number number = 0;
    if (p.when == When::loads_early) number = unit.load(p.from);
    if (p.when == When::reads_early) number = *p.from;
    unit.wait_for_inputs();
    if (p.when == When::behind_the_wait) number = unit.load(p.from);
    if (unit.thread == 0) *p.to = number + 1;
  }
};

// The second of two launches, the first of a First, with `between` between them.
template <class First = uint32_t, class Between>
uint32_t add_two(When when, Between&& between) {
  const DeviceArray<uint32_t> zero(std::vector<uint32_t>(1, 0));
  const DeviceArray<uint32_t> one(std::vector<uint32_t>(1, 0));
  const DeviceArray<uint32_t> two(1);
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  const auto as_first = [](const auto& array) { return reinterpret_cast<First*>(array.data()); };
  host::enqueue<AddsOne<First>>({as_first(zero), as_first(one), When::behind_the_wait}, 1, *queue);
  between(*queue, one.data());
  host::enqueue<AddsOne<uint32_t>>({one.data(), two.data(), when}, 1, *queue);
  queue->wait();
  return two.values()[0];
}

TEST("what a kernel reads or writes before it has waited for its inputs") {
  skip_without_detection(host::Races::all);
  const auto nothing = [](Queue&, auto*) {};
  CHECK_EQ(add_two(When::behind_the_wait, nothing), 2u);
  for (const When when : {When::loads_early, When::reads_early}) {
    CHECK_THROWS(std::logic_error, "reads what a kernel before wrote and has yet to wait",
                 add_two(when, nothing));
    CHECK_EQ(add_two(when, [](Queue& queue, auto*) { queue.wait(); }), 2u);
    const DeviceArray<uint32_t> other(1);
    CHECK_EQ(add_two(when, [&](Queue& queue, auto*) { queue.zero(other.data(), 4); }), 2u);
    const auto reads = [&](Queue& queue, const uint32_t* one) {
      host::enqueue<AddsOne<uint32_t>>({one, other.data(), When::behind_the_wait}, 1, queue);
    };
    CHECK_THROWS(std::logic_error, "reads what a kernel before wrote and has yet to wait",
                 add_two<uint16_t>(when, reads));
  }
  CHECK_THROWS(std::logic_error, "writes and has yet to wait",
               add_two(When::writes_early, nothing));
}

TEST("bank conflicts") {
  skip_without_detection(host::Races::all);
  CHECK_EQ(bank_cycles([](auto& unit, int* numbers) { numbers[unit.lane] = 0; }), 1u);
  CHECK_EQ(bank_cycles([](auto& unit, int* numbers) { numbers[unit.lane * 2] = 0; }), 2u);
  CHECK_EQ(bank_cycles([](auto& unit, int* numbers) { unit.shfl(numbers[unit.lane % 2 * 32], 0); }),
           2u);
  // One word for all lanes, and one more time.
  CHECK_EQ(bank_cycles([](auto& unit, int* numbers) {
             for (int i = 0; i < 2; ++i) {
               if (unit.lane == 0) numbers[5] = i;
               unit.sync_warp();
               unit.shfl(numbers[5], 0);
               unit.sync_warp();
             }
           }),
           4u);
  // Four words of a lane that lie together are one access.
  CHECK_EQ(bank_cycles([](auto& unit, int* numbers) {
             if (unit.lane >= 16) return;
             for (int i = 0; i < 4; ++i) numbers[unit.lane * 4 + i] = 0;
           }),
           2u);
  // Rows of eight lanes at a time: 16 bytes apart they fill the banks, 32 apart two share each.
  const auto rows = [](int apart) {
    return [=](auto& unit, int* numbers) {
      numbers[unit.lane] = numbers[unit.lane + 32] = 0;
      unit.sync_warp();
      uint32_t out[4];
      unit.ldmatrix(out, numbers + unit.lane % 8 * apart);
    };
  };
  CHECK_EQ(bank_cycles(rows(4)), 2u + 4u);
  CHECK_EQ(bank_cycles(rows(8)), 2u + 8u);
  const Case product;
  const host::Banks banks = host::count_banks([&] { product.run<Bug::none>(); });
  CHECK(banks.cycles > 0);
  CHECK_EQ(banks.cycles, banks.least);
  CHECK(banks.worst.empty());
  const host::Banks bad = host::count_banks([] {
    run_racing([](auto& unit, auto& shared, int*) { shared.bytes[unit.thread * 33 % 64] = 1; });
    run_racing([](auto& unit, auto& shared, int*) { shared.numbers[unit.thread] = 1; });
    run_racing([](auto& unit, auto& shared, int*) {
      if (unit.warp == 0) shared.numbers[unit.lane * 2] = 1;
    });
  });
  CHECK_EQ(bad.cycles, bad.least + 3u);  // of each of three blocks the last
  CHECK_EQ(bad.worst.substr(0, 13), "addr2line -e ");
}

TEST("a race is told of with its place") {
  skip_without_detection();
  const std::string text = run_child([] {
                             host::set_seed(1);
                             return Case().run<Bug::no_second_sync>().empty();
                           }).text;
  CHECK(text.find("test_emulator_races.cpp") != std::string::npos);
  CHECK(text.find("race") != std::string::npos);
  if (std::getenv("EFFINFER_SHOW_RACE") != nullptr) std::fputs(text.c_str(), stderr);
}

}  // namespace
}  // namespace effinfer::cuda

CHECK_MAIN()
