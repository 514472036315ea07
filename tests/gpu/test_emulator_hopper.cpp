// What the emulator says of faults in the use of Hopper's instructions, which test_unit_hopper.cpp
// uses as they are to be used.
#include <algorithm>
#include <array>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "core/float16.h"
#include "cpp/check.h"
#include "cuda/tensor_map.h"
#include "gpu/child.h"
#include "gpu/device_arrays.h"
#include "gpu/hopper_device.h"
#include "gpu/host_backend.h"
#include "gpu/host_unit.h"
#include "gpu/mutations.h"

namespace effinfer::cuda {
namespace {

constexpr uint64_t kSeeds = 10;

// Eight warps that do F(unit, shared).
template <class F, int kNeeds>
struct EightWarps {
  static constexpr const char* kName = "eight_warps";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 1;
  static constexpr int kArch = kNeeds;
  struct Params {
    F body;
  };
  struct Shared {
    alignas(1024) std::array<uint16_t, 8192> tile;
    alignas(16) std::array<uint32_t, 64> words;
    Mbarrier barrier;
    Mbarrier other;
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    p.body(unit, shared);
  }
};

template <int kNeeds = 90, class F>
void run_now(F body, uint64_t seed = 1) {
  const OnHopper machine;
  host::run(host::grid_of<EightWarps<F, kNeeds>>({body}, 1), seed);
}

template <class F>
void expect_refusal(const char* message, F body) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    CHECK_THROWS(std::logic_error, message, run_now(body, seed));
  }
}

alignas(1024) std::array<uint32_t, 256> global = {};

// One thread makes a barrier of one arrival, the others come after it.
template <class Unit, class Shared>
void make(Unit& unit, Shared& shared, int count = 1) {
  if (unit.thread == 0) {
    unit.barrier_init(shared.barrier, count);
    unit.fence_async();
  }
  unit.sync();
}

TEST("kernels that need another GPU") {
  const auto nothing = [](auto&, auto&) {};
  CHECK_THROWS(std::logic_error, "expected a GPU of compute capability 100", run_now<100>(nothing));
  CHECK_THROWS(std::logic_error, "expected a kernel with kArch = 90",
               run_now<0>([](auto& unit, auto&) { unit.fence_async(); }));
}

TEST("prefetches are told of, and what no GPU takes is refused") {
  const DeviceArray<uint32_t> words(size_t{256});  // 1 KB
  const auto* const from = reinterpret_cast<const std::byte*>(words.data());
  const auto ask = [](const void* first, int bytes) {
    return [=](auto& unit, auto&) { unit.prefetch(first, bytes); };
  };
  host::record_prefetches();
  run_now(ask(from + 16, 1008));
  run_now<0>(ask(from, 16));
  const std::vector<host::Prefetched> asked = host::recorded_prefetches();
  CHECK_EQ(asked.size(), 16u);  // one a warp
  CHECK_EQ(std::ranges::count(asked, host::Prefetched{"eight_warps", from + 16, 1008}), 8);
  run_now(ask(from, 16));
  CHECK(host::recorded_prefetches().empty());
  expect_refusal("prefetch: expected bytes of one allocation", ask(from + 16, 1024));
  expect_refusal("prefetch: expected bytes of one allocation", ask(from - 16, 32));
  expect_refusal("prefetch: expected an address", ask(from + 4, 16));
  expect_refusal("prefetch: expected a multiple of 16 bytes", ask(from, 20));
  expect_refusal("prefetch: expected a multiple of 16 bytes", ask(from, 0));
  expect_refusal("prefetch: expected the same bytes of all lanes",
                 [=](auto& unit, auto&) { unit.prefetch(from, unit.lane == 9 ? 32 : 16); });
  expect_refusal("prefetch: expected an address in global memory",
                 [](auto& unit, auto& shared) { unit.prefetch(&shared.words[0], 16); });
}

TEST("phases of an mbarrier") {
  expect_refusal("expected a barrier after barrier_init",
                 [](auto& unit, auto& shared) { unit.barrier_arrive(shared.barrier); });
  expect_refusal("barrier_init: the barrier is in use", [](auto& unit, auto& shared) {
    if (unit.thread < 2) unit.barrier_init(shared.barrier, 1);
  });
  // Nobody may know of it before a barrier.
  expect_refusal("barrier_init", [](auto& unit, auto& shared) {
    if (unit.thread == 0) unit.barrier_init(shared.barrier, 1);
    if (unit.thread == 40) unit.barrier_wait(shared.barrier, 1);
  });
  // Phases of two arrivals: bytes that never come hold the first one back.
  expect_refusal("more arrivals than the phase has", [](auto& unit, auto& shared) {
    make(unit, shared, 2);
    if (unit.thread > 0) return;
    unit.barrier_arrive_expect(shared.barrier, 16);
    for (int i = 0; i < 2; ++i) unit.barrier_arrive(shared.barrier);
  });
  expect_refusal("wait in barrier_wait at", [](auto& unit, auto& shared) {
    make(unit, shared);
    if (unit.thread == 0) unit.barrier_arrive(shared.barrier);
    unit.barrier_wait(shared.barrier, 1);  // the second phase
  });
  expect_refusal("deadlock: 1 wait in barrier_wait at", [](auto& unit, auto& shared) {
    make(unit, shared);
    if (unit.thread > 0) return;
    unit.barrier_arrive_expect(shared.barrier, 32);
    unit.copy_bulk(shared.words.data(), global.data(), 16, shared.barrier);
    unit.barrier_wait(shared.barrier, 0);
  });
}

TEST("bulk copies") {
  const auto refuse = [](const char* message, auto copy) {
    expect_refusal(message, [copy](auto& unit, auto& shared) {
      make(unit, shared);
      if (unit.thread > 0) return;
      unit.barrier_arrive_expect(shared.barrier, 16);
      copy(unit, shared);
    });
  };
  refuse("a multiple of its size", [](auto& unit, auto& shared) {
    unit.copy_bulk(shared.words.data() + 1, global.data(), 16, shared.barrier);
  });
  refuse("a multiple of its size", [](auto& unit, auto& shared) {
    unit.copy_bulk(shared.words.data(), global.data() + 2, 16, shared.barrier);
  });
  refuse("a multiple of 16 bytes", [](auto& unit, auto& shared) {
    unit.copy_bulk(shared.words.data(), global.data(), 24, shared.barrier);
  });
  refuse("an address in shared memory", [](auto& unit, auto& shared) {
    unit.copy_bulk(shared.words.data(), global.data(), 4096, shared.barrier);
  });
  refuse("an address in global memory", [](auto& unit, auto& shared) {
    unit.copy_bulk(shared.words.data(), shared.tile.data(), 16, shared.barrier);
  });
  refuse("expected what tensor_map() made", [](auto& unit, auto& shared) {
    const TensorMap map = {};
    unit.copy_tile(shared.tile.data(), map, 0, 0, shared.barrier);
  });
  refuse("expected a barrier after barrier_init", [](auto& unit, auto& shared) {
    unit.copy_bulk(shared.words.data(), global.data(), 16, shared.other);
  });
  expect_refusal("no fence_async since barrier_init", [](auto& unit, auto& shared) {
    if (unit.thread > 0) return;
    unit.barrier_init(shared.barrier, 1);
    unit.copy_bulk(shared.words.data(), global.data(), 16, shared.barrier);
  });
  // Of two bytes that come at any time, one is not there at least once.
  int missing = 0;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    run_now(
        [&](auto& unit, auto& shared) {
          make(unit, shared);
          if (unit.thread > 0) return;
          unit.barrier_arrive_expect(shared.barrier, 16);
          unit.copy_bulk(shared.words.data(), global.data(), 16, shared.barrier);
#if !defined(__SANITIZE_THREAD__)
          missing += *static_cast<const volatile uint32_t*>(shared.words.data()) != 0;
#else
          ++missing;
#endif
          unit.barrier_wait(shared.barrier, 0);
          CHECK_EQ(shared.words[0], 0u);
        },
        seed);
  }
  CHECK(missing > 0);
  // Nobody waits for it.
  bool late = false;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    try {
      run_now(
          [](auto& unit, auto& shared) {
            make(unit, shared);
            if (unit.thread > 0) return;
            unit.barrier_arrive_expect(shared.barrier, 16);
            unit.copy_bulk(shared.words.data(), global.data(), 16, shared.barrier);
          },
          seed);
    } catch (const std::logic_error&) {
      late = true;
    }
  }
  CHECK(late);
}

TEST("barriers of some warps") {
  expect_refusal("expected a barrier from 1 to 15",
                 [](auto& unit, auto&) { unit.sync_some(0, 256); });
  expect_refusal("expected whole warps of the block",
                 [](auto& unit, auto&) { unit.sync_some(1, 288); });
  expect_refusal("threads as those before, got", [](auto& unit, auto&) {
    if (unit.warp < 2) unit.sync_some(1, unit.warp == 0 ? 64 : 96);
    if (unit.warp == 0) unit.sync_some(1, 64);
  });
  expect_refusal("deadlock: 96 wait in sync_some at", [](auto& unit, auto&) {
    if (unit.warp < 3) unit.sync_some(1, 128);
  });
}

TEST("registers") {
  expect_refusal("wait in take_registers", [](auto& unit, auto&) {
    if (unit.warp < 4) unit.template take_registers<256>();
  });
  expect_refusal("has less already",
                 [](auto& unit, auto&) { unit.template give_registers<256>(); });
  expect_refusal("a multiple of 8", [](auto& unit, auto&) { unit.template give_registers<20>(); });
}

// Four warps multiply a tile by itself, and `fault` is done instead of a step.
enum class Fault {
  none,
  no_fence,
  fence_of_others,
  no_commit,
  sums_not_named,
  sums_touched,
  fragment_touched,
  no_fence_async,
  early_fence_async,
  tile_touched,
  beyond,
  other_tile,
  three_warps,
  no_wait,
};

template <Fault kFault, class Unit, class Shared>
void square(Unit& unit, Shared& shared, float* seen) {
  if (unit.warp >= (kFault == Fault::three_warps ? 3 : 4)) return;
  if (kFault == Fault::early_fence_async) {
    unit.fence_async();
    unit.sync_some(2, 128);
  }
  for (int i = unit.thread; i < 64 * 64; i += 128) shared.tile[static_cast<size_t>(i)] = 0x3f80;
  if (kFault != Fault::no_fence_async && kFault != Fault::early_fence_async) unit.fence_async();
  unit.sync_some(1, kFault == Fault::three_warps ? 96 : 128);
  const uint16_t* first = shared.tile.data();
  if (kFault == Fault::other_tile && unit.warp == 2) first += 8 * 64;
  if (kFault == Fault::beyond) first += 8192 - 64 * 8;
  const uint64_t tile = unit.descriptor(first, 16, 1024, Swizzle::bytes128);
  float d[32] = {};
  float other[32] = {};
  uint32_t a[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
  if (kFault == Fault::fence_of_others) unit.wgmma_fence(other);
  if (kFault != Fault::no_fence && kFault != Fault::fence_of_others) unit.wgmma_fence(d, a);
  unit.wgmma(d, a, tile);
  if (kFault != Fault::no_commit) unit.wgmma_commit();
  if (kFault == Fault::sums_touched) d[3] = 7;
  if (kFault == Fault::fragment_touched) a[1] = 7;
  if (kFault == Fault::tile_touched) shared.tile[static_cast<size_t>(unit.thread)] = 0;
  if (kFault == Fault::sums_not_named) unit.template wgmma_wait<0>(other);
  if (kFault != Fault::no_wait) unit.template wgmma_wait<0>(d);
  if (seen != nullptr) seen[unit.thread] = d[unit.lane];
}

TEST("wgmma: what is undefined") {
  const auto refuse = [](const char* message, auto fault) {
    expect_refusal(message, [](auto& unit, auto& shared) {
      square<decltype(fault)::value>(unit, shared, nullptr);
    });
  };
  using enum Fault;
  run_now([](auto& unit, auto& shared) { square<none>(unit, shared, nullptr); });
  refuse("registers were written since the last wgmma_fence",
         std::integral_constant<Fault, no_fence>());
  refuse("registers were written since the last wgmma_fence",
         std::integral_constant<Fault, fence_of_others>());
  refuse("ends before what it has begun", std::integral_constant<Fault, no_commit>());
  refuse("ends before what it has begun", std::integral_constant<Fault, no_wait>());
  refuse("expected the sums that are done", std::integral_constant<Fault, sums_not_named>());
  refuse("its registers were written before wgmma_wait",
         std::integral_constant<Fault, sums_touched>());
  refuse("its registers were written before wgmma_wait",
         std::integral_constant<Fault, fragment_touched>());
  refuse("beyond the block's shared memory", std::integral_constant<Fault, beyond>());
  refuse("its four warps do not agree", std::integral_constant<Fault, other_tile>());
}

TEST("wgmma sees what was written before a fence_async, sums are NaN until they are waited for") {
  const auto first = [](auto fault) {
    std::array<float, 128> seen = {};
    try {
      run_now([&](auto& unit, auto& shared) {
        square<decltype(fault)::value>(unit, shared, seen.data());
      });
    } catch (const std::logic_error&) {
      // As no_wait; where all races are seen, these are.
    }
    return seen[5];
  };
  using enum Fault;
  CHECK_EQ(first(std::integral_constant<Fault, none>()), 16.0f);
  CHECK(!(first(std::integral_constant<Fault, no_fence_async>()) == 16.0f));
  CHECK(!(first(std::integral_constant<Fault, early_fence_async>()) == 16.0f));
  CHECK(!(first(std::integral_constant<Fault, no_wait>()) == 16.0f));
  if (host::detected_races() != host::Races::all) return;
  expect_refusal("wrote without a fence_async",
                 [](auto& unit, auto& shared) { square<no_fence_async>(unit, shared, nullptr); });
  expect_refusal("race: ",
                 [](auto& unit, auto& shared) { square<tile_touched>(unit, shared, nullptr); });
}

// --- y[64, 64] = x[64, k] w[64, k]^T: a warp that brings tiles, and four that multiply them.

enum class Bug {
  none,
  no_full_wait,
  no_empty_wait,
  early_release,
  wrong_parity,
  no_init_sync,
  too_few_bytes,
  too_many_pending,
  one_empty_for_all,
  needless_sync,
};

template <Bug kBug>
struct Pipelined {
  static constexpr const char* kName = "pipelined";
  static constexpr int kThreads = 160;
  static constexpr int kArch = 90;
  static constexpr int kStages = 2;
  static constexpr int kTileBytes = 64 * 64 * 2;
  struct Params {
    TensorMap x;
    TensorMap w;
    float* y;
    int steps;
  };
  struct Shared {
    alignas(1024) uint16_t x[kStages][64 * 64];
    alignas(1024) uint16_t w[kStages][64 * 64];
    Mbarrier full[kStages];
    Mbarrier empty[kStages];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (unit.thread == 0) {
      for (int i = 0; i < kStages; ++i) {
        unit.barrier_init(shared.full[i], 1);
        unit.barrier_init(shared.empty[i], 4);
      }
      unit.fence_async();
    }
    if (kBug != Bug::no_init_sync) unit.sync();
    if (unit.warp < 4) return multiply(unit, p, shared);
    for (int step = 0; step < p.steps; ++step) {
      const int stage = step % kStages;
      const int parity = step / kStages & 1;
      if (unit.lane > 0) return;
      if (kBug != Bug::no_empty_wait) {
        unit.barrier_wait(shared.empty[stage], kBug == Bug::wrong_parity ? parity : parity ^ 1);
      }
      unit.barrier_arrive_expect(shared.full[stage],
                                 kBug == Bug::too_few_bytes ? kTileBytes : 2 * kTileBytes);
      unit.copy_tile(shared.x[stage], p.x, step * 64, 0, shared.full[stage]);
      unit.copy_tile(shared.w[stage], p.w, step * 64, 0, shared.full[stage]);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, Shared& shared) {
    float d[32] = {};
    unit.wgmma_fence(d);
    for (int step = 0; step < p.steps; ++step) {
      const int stage = step % kStages;
      if (kBug != Bug::no_full_wait) unit.barrier_wait(shared.full[stage], step / kStages & 1);
      if (kBug == Bug::needless_sync) unit.sync_warp();
      const uint64_t x = unit.descriptor(shared.x[stage], 16, 1024, Swizzle::bytes128);
      const uint64_t w = unit.descriptor(shared.w[stage], 16, 1024, Swizzle::bytes128);
      for (uint64_t k = 0; k < 4; ++k) unit.wgmma(d, x + 2 * k, w + 2 * k);
      unit.wgmma_commit();
      if (kBug == Bug::early_release && unit.lane == 0) unit.barrier_arrive(shared.empty[stage]);
      // Those of the step before are over.
      unit.template wgmma_wait<kBug == Bug::too_many_pending ? 2 : 1>(d);
      if (kBug != Bug::early_release && unit.lane == 0 && step > 0) {
        unit.barrier_arrive(shared.empty[kBug == Bug::one_empty_for_all ? 0 : stage ^ 1]);
      }
    }
    unit.template wgmma_wait<0>(d);
    const int row = unit.warp * 16 + unit.lane / 4;
    for (int i = 0; i < 32; ++i) {
      const int col = i / 4 * 8 + unit.lane % 4 * 2 + i % 2;
      p.y[(row + i / 2 % 2 * 8) * 64 + col] = d[i];
    }
  }
};

class Case {
 public:
  Case() {
    std::mt19937 random(1);
    const auto small = [&] { return static_cast<int>(random() % 15) - 7; };
    std::vector<int> x(64 * kDepth);
    std::vector<int> w(64 * kDepth);
    for (int& number : x) number = small();
    for (int& number : w) number = small();
    const auto there = [](const std::vector<int>& numbers) {
      std::vector<uint16_t> bits;
      for (const int number : numbers) bits.push_back(f32_to_bf16(static_cast<float>(number)));
      return DeviceArray<uint16_t>(bits);
    };
    x_ = there(x);
    w_ = there(w);
    for (size_t row = 0; row < 64; ++row) {
      for (size_t col = 0; col < 64; ++col) {
        int sum = 0;
        for (size_t k = 0; k < kDepth; ++k) sum += x[row * kDepth + k] * w[col * kDepth + k];
        expected_.push_back(static_cast<float>(sum));
      }
    }
  }

  template <Bug kBug>
  bool is_right() const {
    const OnHopper machine;
    const std::unique_ptr<Queue> queue = make_queue(kGpu);
    const DeviceArray<float> y(64 * 64);
    const auto map = [&](const DeviceArray<uint16_t>& numbers) {
      return tensor_map({numbers.data(), 64, kDepth, kDepth * 2, 64, 64, Swizzle::bytes128},
                        *queue);
    };
    host::enqueue<Pipelined<kBug>>({map(x_), map(w_), y.data(), kDepth / 64}, 1, *queue);
    queue->wait();
    return y.values() == expected_;
  }
  // Under no seed right.
  template <Bug kBug>
  bool is_seen() const {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      host::set_seed(seed << 32);
      const Child child = run_child([&] { return is_right<kBug>(); });
      if (!child.succeeded()) return true;
    }
    return false;
  }

 private:
  static constexpr int kDepth = 5 * 64;
  DeviceArray<uint16_t> x_;
  DeviceArray<uint16_t> w_;
  std::vector<float> expected_;
};

TEST("a pipeline of tiles, and what may be missing in it") {
  const Case one;
  using enum Bug;
  CHECK(!one.is_seen<none>());
  CHECK(!one.is_seen<needless_sync>());
  CHECK(one.is_seen<no_full_wait>());
  CHECK(one.is_seen<no_empty_wait>());
  CHECK(one.is_seen<early_release>());
  CHECK(one.is_seen<wrong_parity>());
  CHECK(one.is_seen<no_init_sync>());
  CHECK(one.is_seen<too_few_bytes>());
  CHECK(one.is_seen<too_many_pending>());
  CHECK(one.is_seen<one_empty_for_all>());
}

TEST("each barrier, wait and fence of it") {
  const Case one;
  expect_every_barrier_matters([&] { return one.is_right<Bug::none>(); });
  std::vector<host::Site> needless =
      needless_barriers([&] { return one.is_right<Bug::needless_sync>(); }, 10);
  CHECK_EQ(needless.size(), 1u);
  if (!needless.empty()) CHECK_EQ(needless[0].what, std::string("sync_warp"));
}

}  // namespace
}  // namespace effinfer::cuda

CHECK_MAIN()
