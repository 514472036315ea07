// The emulator of the GPU tests: each instruction against what PTX says of it, and what is
// undefined there against an error.
#include <array>
#include <bit>
#include <cmath>
#include <csignal>
#include <limits>

#include "core/float16.h"
#include "cpp/arrays.h"
#include "cpp/check.h"
#include "gpu/child.h"
#include "gpu/device_arrays.h"
#include "gpu/host_unit.h"

namespace effinfer::cuda {
namespace {

constexpr uint64_t kSeeds = 10;

// Runs it over the host's own arrays.
template <class Kernel>
void run_now(const typename Kernel::Params& params, int64_t blocks = 1, uint64_t seed = 1) {
  host::run(host::grid_of<Kernel>(params, blocks), seed);
}

// One warp whose lanes do F(unit, lane's own out).
template <class F>
struct OneWarp {
  static constexpr const char* kName = "one_warp";
  static constexpr int kThreads = 32;
  struct Params {
    F body;
  };
  struct Shared {
    alignas(16) std::array<uint16_t, 512> numbers;
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    p.body(unit, shared);
  }
};

template <class F>
void in_warp(F body) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) run_now<OneWarp<F>>({body}, 1, seed);
}

TEST("shuffles and ballots") {
  std::array<int, 32> from = {};
  std::array<int, 32> rotated = {};
  std::array<double, 32> crossed = {};
  std::array<uint32_t, 32> votes = {};
  in_warp([&](auto& unit, auto&) {
    const auto lane = static_cast<size_t>(unit.lane);
    from[lane] = unit.shfl(100 + unit.lane, 7);
    rotated[lane] = unit.shfl(100 + unit.lane, unit.lane + 5);  // the lane's number modulo 32
    crossed[lane] = unit.shfl_xor(0.5 + unit.lane, 19);
    votes[lane] = unit.ballot(unit.lane % 3 == 1);
  });
  uint32_t expected = 0;
  for (int lane = 0; lane < 32; ++lane) expected |= uint32_t{lane % 3 == 1} << lane;
  for (int lane = 0; lane < 32; ++lane) {
    const auto i = static_cast<size_t>(lane);
    CHECK_EQ(from[i], 107);
    CHECK_EQ(rotated[i], 100 + (lane + 5) % 32);
    CHECK_EQ(crossed[i], 0.5 + (lane ^ 19));
    CHECK_EQ(votes[i], expected);
  }
}

TEST("a GPU that is too old is no device, and who asks for it hears why") {
  host::set_arch(75);
  const std::vector<Device> devices = available_devices();
  const Device chosen = parse_device("auto", "[test] device");
  std::string refusal;
  try {
    parse_device("cuda", "[test] device");
  } catch (const InvalidArgument& error) {
    refusal = error.what();
  }
  host::set_arch(80);
  CHECK_EQ(devices.size(), 1u);
  CHECK(chosen == Device{});
  CHECK(refusal.find("of compute capability 7.5, kernels need 8.0 or later") != std::string::npos);
  CHECK_EQ(available_devices().size(), 2u);
}

TEST("bf16x2 rounds to nearest even") {
  const auto packed = [](float low, float high) {
    uint32_t out = 0;
    in_warp([&](auto& unit, auto&) {
      if (unit.lane == 0) out = unit.bf16x2(low, high);
    });
    return out;
  };
  CHECK_EQ(packed(1.0f, -2.0f), 0xc0003f80u);
  // 1 + 2^-8 lies between two numbers and goes to the even one, 1 + 3 2^-8 as well.
  CHECK_EQ(packed(1 + 0x1p-8f, 1 + 3 * 0x1p-8f), 0x3f823f80u);
  CHECK_EQ(packed(1 + 0x1p-8f + 0x1p-20f, 0x1p-133f), 0x00013f81u);
  CHECK_EQ(packed(std::numeric_limits<float>::infinity(), 3.4e38f), 0x7f807f80u);
  CHECK_EQ(packed(std::nanf(""), -std::nanf("1")), 0x7fff7fffu);
}

TEST("atomic_add, in any order of threads") {
  int count = 0;
  float sum = 0;
  std::array<int, 32> before = {};
  in_warp([&](auto& unit, auto&) {
    before[static_cast<size_t>(unit.lane)] = unit.atomic_add(&count, 1);
    unit.atomic_add(&sum, 0.25f);
  });
  CHECK_EQ(count, int{32 * kSeeds});
  CHECK_EQ(sum, 8.0f * kSeeds);
  std::sort(before.begin(), before.end());
  for (int i = 0; i < 32; ++i) CHECK_EQ(before[static_cast<size_t>(i)], int{32 * (kSeeds - 1)} + i);
}

// PTX ISA, ldmatrix: threads 8 m to 8 m + 7 hold the addresses of the rows of matrix m; thread t
// receives of each matrix elements 2 (t mod 4) and the next of row t / 4.
TEST("ldmatrix") {
  std::array<std::array<uint32_t, 4>, 32> out = {};
  in_warp([&](auto& unit, auto& shared) {
    for (int i = unit.lane; i < 256; i += 32) shared.numbers[static_cast<size_t>(i)] = i;
    unit.sync_warp();
    // Row r of matrix m lies where rows are counted backwards.
    uint32_t registers[4];
    unit.ldmatrix(registers, &shared.numbers[static_cast<size_t>(31 - unit.lane) * 8]);
    std::copy(registers, registers + 4, out[static_cast<size_t>(unit.lane)].begin());
  });
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const int place = (31 - (matrix * 8 + lane / 4)) * 8 + lane % 4 * 2;
      CHECK_EQ(out[static_cast<size_t>(lane)][static_cast<size_t>(matrix)],
               static_cast<uint32_t>(place | (place + 1) << 16));
    }
  }
}

// With .trans: elements 2 (t mod 4) and the next of column t / 4.
TEST("ldmatrix, transposed") {
  std::array<std::array<uint32_t, 4>, 32> out = {};
  in_warp([&](auto& unit, auto& shared) {
    for (int i = unit.lane; i < 256; i += 32) shared.numbers[static_cast<size_t>(i)] = i;
    unit.sync_warp();
    uint32_t registers[4];
    unit.ldmatrix_transposed(registers, &shared.numbers[static_cast<size_t>(31 - unit.lane) * 8]);
    std::copy(registers, registers + 4, out[static_cast<size_t>(unit.lane)].begin());
  });
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const int first = (31 - (matrix * 8 + lane % 4 * 2)) * 8 + lane / 4;
      CHECK_EQ(out[static_cast<size_t>(lane)][static_cast<size_t>(matrix)],
               static_cast<uint32_t>(first | (first - 8) << 16));
    }
  }
}

// Fragments in the words of the PTX ISA: element i of a thread's fragment is a[i], b[i] or c[i].
struct Place {
  int row;
  int col;
};
// "Matrix Fragments for mma.m16n8k16 with floating point type".
Place place_a16(int lane, int i) {
  const int group = lane >> 2;
  const int in_group = lane % 4;
  const bool upper = (i >= 0 && i < 2) || (i >= 4 && i < 6);
  return {upper ? group : group + 8, i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8};
}
Place place_b16(int lane, int i) {
  const int row = (lane % 4) * 2 + (i & 1);
  return {i < 2 ? row : row + 8, lane >> 2};
}
// "Matrix Fragments for mma.m16n8k32" of 8-bit integers.
Place place_a8(int lane, int i) {
  const bool upper = (i >= 0 && i < 4) || (i >= 8 && i < 12);
  const int col = (lane % 4) * 4 + (i & 3);
  return {upper ? lane >> 2 : (lane >> 2) + 8, i < 8 ? col : col + 16};
}
Place place_b8(int lane, int i) {
  const int row = (lane % 4) * 4 + (i & 3);
  return {i < 4 ? row : row + 16, lane >> 2};
}
Place place_c(int lane, int i) {
  return {i < 2 ? lane >> 2 : (lane >> 2) + 8, (lane % 4) * 2 + (i & 1)};
}

// d += a b by `instruction`(unit, d, a, b), whose operands are numbers of `kBits` bits, against the
// plain product. The numbers are small integers, so sums are exact.
template <class Sum, int kBits, class Encode, class Instruction>
void check_mma(Place (*place_a)(int, int), Place (*place_b)(int, int), Encode encode,
               Instruction instruction) {
  constexpr int kDepth = 256 / kBits;
  constexpr int kEach = 32 / kBits;  // in a register
  std::mt19937 random(1);
  std::uniform_int_distribution<int> small(-7, 7);
  int a[16][kDepth];
  int b[kDepth][8];
  int c[16][8];
  for (auto& row : a) std::generate(std::begin(row), std::end(row), [&] { return small(random); });
  for (auto& row : b) std::generate(std::begin(row), std::end(row), [&] { return small(random); });
  for (auto& row : c) std::generate(std::begin(row), std::end(row), [&] { return small(random); });
  Sum out[16][8] = {};
  in_warp([&](auto& unit, auto&) {
    uint32_t registers_a[4] = {};
    uint32_t registers_b[2] = {};
    Sum d[4];
    for (int i = 0; i < 4 * kEach; ++i) {
      const Place at = place_a(unit.lane, i);
      registers_a[i / kEach] |= encode(a[at.row][at.col]) << i % kEach * kBits;
    }
    for (int i = 0; i < 2 * kEach; ++i) {
      const Place at = place_b(unit.lane, i);
      registers_b[i / kEach] |= encode(b[at.row][at.col]) << i % kEach * kBits;
    }
    for (int i = 0; i < 4; ++i) {
      const Place at = place_c(unit.lane, i);
      d[i] = static_cast<Sum>(c[at.row][at.col]);
    }
    instruction(unit, d, registers_a, registers_b);
    for (int i = 0; i < 4; ++i) {
      const Place at = place_c(unit.lane, i);
      out[at.row][at.col] = d[i];
    }
  });
  for (int row = 0; row < 16; ++row) {
    for (int col = 0; col < 8; ++col) {
      int expected = c[row][col];
      for (int k = 0; k < kDepth; ++k) expected += a[row][k] * b[k][col];
      CHECK_EQ(out[row][col], static_cast<Sum>(expected));
    }
  }
}

TEST("mma of bfloat16, float16 and int8") {
  check_mma<float, 16>(
      place_a16, place_b16, [](int x) { return uint32_t{f32_to_bf16(static_cast<float>(x))}; },
      [](auto& unit, auto& d, auto& a, auto& b) { unit.mma(d, a, b); });
  check_mma<float, 16>(
      place_a16, place_b16, [](int x) { return uint32_t{f32_to_f16(static_cast<float>(x))}; },
      [](auto& unit, auto& d, auto& a, auto& b) { unit.mma_f16(d, a, b); });
  check_mma<int32_t, 8>(
      place_a8, place_b8, [](int x) { return static_cast<uint32_t>(x) & 0xffu; },
      [](auto& unit, auto& d, auto& a, auto& b) { unit.mma_s8(d, a, b); });
}

TEST("asynchronous copies land when they are waited for, with zeros where invalid") {
  alignas(16) std::array<uint16_t, 16> global;
  for (size_t i = 0; i < global.size(); ++i) global[i] = static_cast<uint16_t>(100 + i);
  std::array<uint16_t, 6> seen = {};
  in_warp([&](auto& unit, auto& shared) {
    if (unit.lane > 0) return;
    const uint16_t* numbers = shared.numbers.data();
    const auto look = [&](size_t i) { return *static_cast<const volatile uint16_t*>(numbers + i); };
    unit.copy_async(&shared.numbers[0], &global[0]);
    unit.commit();
    unit.copy_async(&shared.numbers[8], &global[8]);
    unit.copy_async(&shared.numbers[16], nullptr, false);
    unit.commit();
    unit.template wait<1>();
    seen[0] = look(7);
    unit.template wait<0>();
    seen[2] = look(8);
    seen[3] = look(15);
    seen[4] = look(16);
    seen[5] = look(24);
  });
  CHECK_EQ(seen[0], 107);
  CHECK_EQ(seen[2], 108);
  CHECK_EQ(seen[3], 115);
  CHECK_EQ(seen[4], 0);
  CHECK_EQ(seen[5], 0xffff);
}

struct FreshShared {
  static constexpr const char* kName = "fresh_shared";
  static constexpr int kThreads = 64;
  struct Params {
    int* stale;
  };
  struct Shared {
    float numbers[64];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    float& mine = shared.numbers[unit.thread];
    if (mine == mine) ++p.stale[unit.thread];
    mine = 1;
  }
};

TEST("shared memory is NaN when a block starts") {
  std::vector<int> stale(FreshShared::kThreads);
  run_now<FreshShared>({stale.data()}, 5);
  CHECK(stale == std::vector<int>(stale.size()));
}

// What each thread of a block of two warps does.
template <class F>
struct TwoWarps {
  static constexpr const char* kName = "two_warps";
  static constexpr int kThreads = 64;
  struct Params {
    F body;
  };
  struct Shared {
    alignas(16) std::array<uint32_t, 64> words;
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    p.body(unit, shared);
  }
};

template <class F>
void expect_refusal(const char* message, F body) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    CHECK_THROWS(std::logic_error, message, run_now<TwoWarps<F>>({body}, 1, seed));
  }
  CHECK_THROWS(std::logic_error, "[two_warps] block 0: ", run_now<TwoWarps<F>>({body}));
}

TEST("collectives that not all threads reach") {
  expect_refusal("deadlock: 63 of 64 wait in sync at ", [](auto& unit, auto&) {
    if (unit.thread != 40) unit.sync();
  });
  expect_refusal("test_emulator.cpp", [](auto& unit, auto&) {
    if (unit.lane >= 16) unit.ballot(true);
  });
  expect_refusal("16 of 32 wait in shfl_xor at", [](auto& unit, auto&) {
    if (unit.lane < 16) unit.shfl_xor(1, 1);
  });
  expect_refusal("same: expected a number that all of the warp have",
                 [](auto& unit, auto&) { unit.same(static_cast<uint32_t>(unit.lane / 16)); });
  // Threads of a warp in different collectives, or in the same one from two lines.
  expect_refusal("divergence", [](auto& unit, auto&) {
    if (unit.lane < 16) {
      unit.sync_warp();
    } else {
      unit.ballot(true);
    }
  });
  expect_refusal("divergence", [](auto& unit, auto&) {
    if (unit.warp == 0) {
      unit.sync();
    } else {
      unit.sync();
    }
  });
}

template <class F>
struct TwoWaitingWarps : TwoWarps<F> {
  static constexpr bool kWaitsItself = true;
};

TEST("a kernel that waits itself does so in each thread") {
  const auto all = [](auto& unit, auto&) { unit.wait_for_inputs(); };
  run_now<TwoWaitingWarps<decltype(all)>>({all});
  const auto some = [](auto& unit, auto&) {
    if (unit.thread != 40) unit.wait_for_inputs();
  };
  CHECK_THROWS(std::logic_error, "thread 40: wait_for_inputs: leaves before it has called that",
               run_now<TwoWaitingWarps<decltype(some)>>({some}));
}

alignas(16) std::array<uint32_t, 64> global = {};

TEST("memory of the wrong kind or alignment") {
  expect_refusal("copy_async",
                 [](auto& unit, auto& shared) { unit.copy_async(&shared.words[1], &global[0]); });
  expect_refusal("copy_async",
                 [](auto& unit, auto& shared) { unit.copy_async(&shared.words[0], &global[1]); });
  expect_refusal("copy_async: expected an address in shared memory",
                 [](auto& unit, auto&) { unit.copy_async(&global[0], &global[0]); });
  expect_refusal("copy_async: expected an address in global memory", [](auto& unit, auto& shared) {
    unit.copy_async(&shared.words[0], &shared.words[4]);
  });
  expect_refusal("ldmatrix", [](auto& unit, auto& shared) {
    uint32_t out[4];
    unit.ldmatrix(out, &shared.words[2]);
  });
  expect_refusal("ldmatrix", [](auto& unit, auto&) {
    uint32_t out[4];
    unit.ldmatrix(out, &global[0]);
  });
  expect_refusal("load",
                 [](auto& unit, auto&) { unit.load(reinterpret_cast<const Quad*>(&global[1])); });
  expect_refusal("load", [](auto& unit, auto& shared) { unit.load_once(&shared.words[0]); });
  expect_refusal("atomic_add",
                 [](auto& unit, auto& shared) { unit.atomic_add(&shared.words[0], 1u); });
  expect_refusal("add_shared", [](auto& unit, auto&) { unit.add_shared(&global[0], 1u); });
  expect_refusal("shfl_xor", [](auto& unit, auto&) { unit.shfl_xor(1, 32); });
  expect_refusal("leaves before its copies have landed", [](auto& unit, auto& shared) {
    unit.copy_async(&shared.words[0], &global[0]);
    unit.commit();
  });
}

// As no sanitizer sees it.
[[gnu::noinline, gnu::no_sanitize_address, gnu::no_sanitize_thread]] void write_to(char* place) {
  *static_cast<volatile char*>(place) = 0;
}

struct Poke {
  static constexpr const char* kName = "poke";
  static constexpr int kThreads = 32;
  struct Params {
    char* place;
  };
  struct Shared {
    char bytes[40];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (unit.lane == 3) write_to(p.place == nullptr ? shared.bytes + sizeof shared : p.place);
  }
};

void poke(char* place) {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  host::enqueue<Poke>({place}, 1, *queue);
  queue->wait();
}

TEST("only kernels and queues may touch the device's memory") {
  const DeviceArray<char> array(1000);
  char* const inside = array.data() + 999;
  const auto write = [&] {
    write_to(inside);
    return true;
  };
  CHECK_EQ(run_child(write).signal(), SIGSEGV);
  poke(inside);
  CHECK_EQ(run_child(write).signal(), SIGSEGV);
}

TEST("writes beyond the ends of memory") {
  const DeviceArray<char> array(1000);
  const auto far = [&] {
    poke(array.data() + 4096);
    return true;
  };
  CHECK_EQ(run_child(far).signal(), SIGSEGV);
  poke(array.data());
  CHECK_THROWS(std::logic_error, "[poke] block 0: shared memory", poke(nullptr));
  // Last: what has been written there stays.
  CHECK_THROWS(std::logic_error, "allocation of 1000 bytes", poke(array.data() + 1000));
}

struct Overrun {
  static constexpr const char* kName = "overrun";
  static constexpr int kThreads = 32;
  struct Params {
    const float* from;
    float* to;
    int place;
  };
  struct Shared {
    float numbers[10];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (unit.lane > 0) return;
    float* const own = shared.numbers;
    own[p.place == 0 ? 10 : 9] = p.from[p.place == 1 ? 250 : 0];
    p.to[p.place == 2 ? 250 : 0] = own[p.place == 3 ? 10 : 9];
  }
};

TEST("AddressSanitizer names what is a number beyond the ends") {
#if defined(__SANITIZE_ADDRESS__)
  const DeviceArray<float> from(250);
  const DeviceArray<float> to(250);
  for (const int place : {-1, 0, 1, 2, 3}) {
    const Child child = run_child([&] {
      const std::unique_ptr<Queue> queue = make_queue(kGpu);
      host::enqueue<Overrun>({from.data(), to.data(), place}, 1, *queue);
      queue->wait();
      return true;
    });
    CHECK_EQ(child.succeeded(), place < 0);
    if (place < 0) continue;
    CHECK(child.text.find("use-after-poison") != std::string::npos);
    CHECK(child.text.find("test_emulator") != std::string::npos);
  }
#else
  check::skip("built without it");
#endif
}

}  // namespace
}  // namespace effinfer::cuda

CHECK_MAIN()
