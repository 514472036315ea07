// Each method of the Unit that kernels are written in against plain arithmetic, in the emulator and
// on a GPU: the proof of the PTX of device_unit.cuh, whose Hopper part is in test_unit_hopper.cpp.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "core/float16.h"
#include "cpp/check.h"
#include "gpu/unit_kernels.h"

namespace effinfer::cuda {
namespace {

struct Nothing {};

std::vector<uint32_t> random_words(size_t count) {
  std::mt19937 random(7);
  std::vector<uint32_t> words(count);
  std::generate(words.begin(), words.end(), [&] { return static_cast<uint32_t>(random()); });
  return words;
}

struct Places {
  static constexpr int kThreads = 96;
  using Shared = Nothing;
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& thread, const WordParams& p, Shared&) {
    const Unit unit = p.in[0] == 0 ? thread.anew() : thread;
    uint32_t* out = p.out + (unit.block * kThreads + unit.thread) * 4;
    out[0] = static_cast<uint32_t>(unit.lane);
    out[1] = static_cast<uint32_t>(unit.warp);
    out[2] = static_cast<uint32_t>(unit.block);
    out[3] = static_cast<uint32_t>(unit.num_blocks);
  }
};

TEST("thread, lane, warp, block, num_blocks, and anew") {
  for (const uint32_t is_old : {0u, 1u}) {
    const auto out = words_of<WordKernel<Places>>({is_old}, 3 * 96 * 4, 3);
    for (uint32_t i = 0; i < 3 * 96; ++i) {
      CHECK_EQ(out[i * 4], i % 32);
      CHECK_EQ(out[i * 4 + 1], i % 96 / 32);
      CHECK_EQ(out[i * 4 + 2], i / 96);
      CHECK_EQ(out[i * 4 + 3], 3u);
    }
  }
}

// Of 3 KB and of 16 bytes, by both warps of each block.
struct Prefetches {
  static constexpr int kThreads = 64;
  using Shared = Nothing;
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared&) {
    const uint32_t* from = p.in + unit.block * 1024 + unit.warp * 512;
    unit.prefetch(from + 4, 3072 / 2);
    unit.prefetch(from, 16);
    const int at = unit.block * kThreads + unit.thread;
    p.out[at] = unit.load(p.in + 2047 - 16 * at);
  }
};

TEST("prefetch changes nothing") {
  const auto in = random_words(2048);
  const auto out = words_of<WordKernel<Prefetches>>(in, 2 * 64, 2);
  for (uint32_t i = 0; i < 128; ++i) CHECK_EQ(out[i], in[2047 - 16 * i]);
  if (!OnHopper::is_possible()) return;
  const OnHopper machine;
  CHECK(words_of<HopperKernel<Prefetches>>(in, 2 * 64, 2) == out);
}

struct Shuffles {
  static constexpr int kThreads = 32;
  using Shared = Nothing;
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared&) {
    const uint32_t mine = p.in[unit.lane];
    uint32_t* out = p.out + unit.lane * 6;
    out[0] = unit.shfl(mine, unit.lane * 3 + 5);
    out[1] = unit.shfl_xor(mine, 19);
    const uint64_t both = unit.shfl_xor(uint64_t{mine} << 32 | static_cast<uint32_t>(unit.lane), 1);
    out[2] = static_cast<uint32_t>(both);
    out[3] = static_cast<uint32_t>(both >> 32);
    out[4] = unit.ballot((mine & 1) != 0);
    out[5] = unit.same(p.in[0]);
  }
};

TEST("shfl, shfl_xor, ballot, same") {
  const auto in = random_words(32);
  const auto out = words_of<WordKernel<Shuffles>>(in, 32 * 6);
  uint32_t votes = 0;
  for (uint32_t i = 0; i < 32; ++i) votes |= (in[i] & 1) << i;
  for (uint32_t i = 0; i < 32; ++i) {
    CHECK_EQ(out[i * 6], in[(i * 3 + 5) % 32]);
    CHECK_EQ(out[i * 6 + 1], in[i ^ 19]);
    CHECK_EQ(out[i * 6 + 2], i ^ 1);
    CHECK_EQ(out[i * 6 + 3], in[i ^ 1]);
    CHECK_EQ(out[i * 6 + 4], votes);
    CHECK_EQ(out[i * 6 + 5], in[0]);
  }
}

struct Exchange {
  static constexpr int kThreads = 128;
  struct Shared {
    uint32_t words[kThreads];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    shared.words[unit.thread] = p.in[unit.thread];
    unit.sync_warp();
    const uint32_t of_warp = shared.words[unit.thread ^ 31];
    unit.sync();
    p.out[unit.thread * 2] = of_warp;
    p.out[unit.thread * 2 + 1] = shared.words[kThreads - 1 - unit.thread];
  }
};

TEST("sync, sync_warp") {
  const auto in = random_words(128);
  const auto out = words_of<WordKernel<Exchange>>(in, 256);
  for (uint32_t i = 0; i < 128; ++i) {
    CHECK_EQ(out[i * 2], in[i ^ 31]);
    CHECK_EQ(out[i * 2 + 1], in[127 - i]);
  }
}

struct Copies {
  static constexpr int kThreads = 32;
  struct Shared {
    alignas(16) uint32_t words[2][32][4];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    unit.copy_async(shared.words[0][unit.lane], p.in + unit.lane * 4);
    unit.commit();
    unit.copy_async(shared.words[1][unit.lane], p.in + (31 - unit.lane) * 4, unit.lane % 3 != 0);
    unit.commit();
    unit.template wait<1>();
    unit.sync_warp();
    for (int i = 0; i < 4; ++i) p.out[unit.lane * 8 + i] = shared.words[0][unit.lane ^ 1][i];
    unit.template wait<0>();
    unit.sync_warp();
    for (int i = 0; i < 4; ++i) p.out[unit.lane * 8 + 4 + i] = shared.words[1][unit.lane ^ 1][i];
  }
};

TEST("copy_async, commit, wait") {
  const auto in = random_words(128);
  const auto out = words_of<WordKernel<Copies>>(in, 256);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t other = lane ^ 1;
    for (uint32_t i = 0; i < 4; ++i) {
      CHECK_EQ(out[lane * 8 + i], in[other * 4 + i]);
      CHECK_EQ(out[lane * 8 + 4 + i], other % 3 != 0 ? in[(31 - other) * 4 + i] : 0u);
    }
  }
}

struct SomeCopies {
  static constexpr int kThreads = 32;
  struct Shared {
    alignas(16) uint32_t words[32][4];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    for (uint32_t& word : shared.words[unit.lane]) word = 7;
    unit.copy_async_if(unit.lane % 3 == 0, shared.words[unit.lane], p.in + unit.lane * 4);
    unit.commit();
    unit.template wait<0>();
    unit.sync_warp();
    for (int i = 0; i < 4; ++i) p.out[unit.lane * 4 + i] = shared.words[unit.lane ^ 1][i];
  }
};

TEST("copy_async_if") {
  const auto in = random_words(128);
  const auto out = words_of<WordKernel<SomeCopies>>(in, 128);
  for (uint32_t i = 0; i < 128; ++i) {
    const uint32_t other = i / 4 ^ 1;
    CHECK_EQ(out[i], other % 3 == 0 ? in[other * 4 + i % 4] : 7u);
  }
}

struct Matrices {
  static constexpr int kThreads = 32;
  struct Shared {
    alignas(16) uint32_t rows[32][4];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    for (int i = 0; i < 4; ++i) shared.rows[unit.lane][i] = p.in[unit.lane * 4 + i];
    unit.sync_warp();
    uint32_t registers[4];
    unit.ldmatrix(registers, shared.rows[31 - unit.lane]);
    unit.keep_order();
    for (int i = 0; i < 4; ++i) p.out[unit.lane * 8 + i] = registers[i];
    unit.ldmatrix_transposed(registers, shared.rows[31 - unit.lane]);
    for (int i = 0; i < 4; ++i) p.out[unit.lane * 8 + 4 + i] = registers[i];
  }
};

TEST("ldmatrix, ldmatrix_transposed, keep_order") {
  const auto in = random_words(128);
  const auto out = words_of<WordKernel<Matrices>>(in, 256);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t matrix = 0; matrix < 4; ++matrix) {
      const auto number = [&](uint32_t row, uint32_t col) {
        return in[(31 - (matrix * 8 + row)) * 4 + col / 2] >> 16 * (col % 2) & 0xffff;
      };
      const uint32_t own = lane / 4;
      const uint32_t pair = lane % 4 * 2;
      CHECK_EQ(out[lane * 8 + matrix], number(own, pair) | number(own, pair + 1) << 16);
      CHECK_EQ(out[lane * 8 + 4 + matrix], number(pair, own) | number(pair + 1, own) << 16);
    }
  }
}

// in: a[32][4], b[32][2], d[32][4]; out: d[32][4].
enum class Kind : uint8_t { bf16, f16, s8 };
template <Kind kKind>
struct Products {
  static constexpr int kThreads = 32;
  using Shared = Nothing;
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared&) {
    uint32_t a[4];
    uint32_t b[2];
    for (int i = 0; i < 4; ++i) a[i] = p.in[unit.lane * 4 + i];
    for (int i = 0; i < 2; ++i) b[i] = p.in[128 + unit.lane * 2 + i];
    const uint32_t* before = p.in + 192 + unit.lane * 4;
    if constexpr (kKind == Kind::s8) {
      int32_t d[4];
      for (int i = 0; i < 4; ++i) d[i] = static_cast<int32_t>(before[i]);
      unit.mma_s8(d, a, b);
      for (int i = 0; i < 4; ++i) p.out[unit.lane * 4 + i] = static_cast<uint32_t>(d[i]);
    } else {
      float d[4];
      for (int i = 0; i < 4; ++i) d[i] = float_of(before[i]);
      if constexpr (kKind == Kind::bf16) unit.mma(d, a, b);
      if constexpr (kKind == Kind::f16) unit.mma_f16(d, a, b);
      for (int i = 0; i < 4; ++i) p.out[unit.lane * 4 + i] = bits_of(d[i]);
    }
  }
};

uint32_t encoded(Kind kind, int value) {
  const auto number = static_cast<float>(value);
  return kind == Kind::s8    ? static_cast<uint32_t>(value) & 0xffu
         : kind == Kind::f16 ? uint32_t{f32_to_f16(number)}
                             : uint32_t{f32_to_bf16(number)};
}

template <Kind kKind>
void check_products() {
  constexpr int kEach = kKind == Kind::s8 ? 4 : 2;  // numbers of a register
  constexpr int kDepth = 8 * kEach;
  std::mt19937 random(3);
  const auto small = [&] { return static_cast<int>(random() % 15) - 7; };
  std::vector<int> a(16 * kDepth);
  std::vector<int> b(kDepth * 8);
  std::generate(a.begin(), a.end(), small);
  std::generate(b.begin(), b.end(), small);
  std::vector<uint32_t> in(320);
  std::vector<uint32_t> expected(128);
  const auto sum_word = [](int sum) {
    return kKind == Kind::s8 ? static_cast<uint32_t>(sum) : bits_of(static_cast<float>(sum));
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    for (int r = 0; r < 4; ++r) {
      for (int e = 0; e < kEach; ++e) {
        const int k = kEach * t + e;
        const int bits = 32 / kEach * e;
        in[static_cast<size_t>(lane * 4 + r)] |=
            encoded(kKind,
                    a[static_cast<size_t>((g + r % 2 * 8) * kDepth + k + r / 2 * kDepth / 2)])
            << bits;
        if (r >= 2) continue;
        in[static_cast<size_t>(128 + lane * 2 + r)] |=
            encoded(kKind, b[static_cast<size_t>((k + r * kDepth / 2) * 8 + g)]) << bits;
      }
      const int row = g + r / 2 * 8;
      const int col = 2 * t + r % 2;
      int sum = small();
      in[static_cast<size_t>(192 + lane * 4 + r)] = sum_word(sum);
      for (int k = 0; k < kDepth; ++k) {
        sum += a[static_cast<size_t>(row * kDepth + k)] * b[static_cast<size_t>(k * 8 + col)];
      }
      expected[static_cast<size_t>(lane * 4 + r)] = sum_word(sum);
    }
  }
  CHECK(words_of<WordKernel<Products<kKind>>>(in, 128) == expected);
}

TEST("mma") {
  check_products<Kind::bf16>();
}
TEST("mma_f16") {
  check_products<Kind::f16>();
}
TEST("mma_s8") {
  check_products<Kind::s8>();
}

struct Loads {
  static constexpr int kThreads = 32;
  using Shared = Nothing;
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared&) {
    const uint32_t* from = p.in + unit.lane * 4;
    uint32_t* out = p.out + unit.lane * 12;
    const Quad plain = unit.load(reinterpret_cast<const Quad*>(from));
    const Quad once = unit.load_once(reinterpret_cast<const Quad*>(from));
    for (int i = 0; i < 4; ++i) out[i] = plain.words[i];
    for (int i = 0; i < 4; ++i) out[4 + i] = once.words[i];
    out[8] = unit.load(from + 1);
    out[9] = unit.load_once(from + 2);
    const uint64_t both = unit.load_once(reinterpret_cast<const uint64_t*>(from + 2));
    out[10] = static_cast<uint32_t>(both >> 32);
    out[11] = unit.load(reinterpret_cast<const uint16_t*>(from + 3));
  }
};

TEST("load, load_once") {
  const auto in = random_words(128);
  const auto out = words_of<WordKernel<Loads>>(in, 32 * 12);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t* from = in.data() + lane * 4;
    const uint32_t* got = out.data() + lane * 12;
    CHECK(std::equal(got, got + 4, from));
    CHECK(std::equal(got + 4, got + 8, from));
    CHECK_EQ(got[8], from[1]);
    CHECK_EQ(got[9], from[2]);
    CHECK_EQ(got[10], from[3]);
    CHECK_EQ(got[11], from[3] & 0xffff);
  }
}

// The last block to count sums what the others left behind.
struct Counts {
  static constexpr int kThreads = 64;
  struct Shared {
    uint32_t before;
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    // out: a counter, a float, the sum, then a word for each thread of each block. The first two
    // start as what `in` says: the first block cannot know that it is the first.
    uint32_t* const words = p.out + 4;
    words[unit.block * kThreads + unit.thread] = p.in[unit.block * kThreads + unit.thread];
    unit.fence();
    unit.sync();
    if (unit.thread == 0) shared.before = unit.atomic_add(p.out, uint32_t{1}) - 0xdeadbeef;
    unit.sync();
    if (shared.before != static_cast<uint32_t>(unit.num_blocks) - 1) return;
    unit.fence();
    if (unit.thread != 0) return;
    uint32_t sum = 0;
    for (int i = 0; i < unit.num_blocks * kThreads; ++i) {
      sum += static_cast<const volatile uint32_t*>(words)[i];
    }
    p.out[2] = sum;
    p.out[1] = bits_of(1.5f);
    unit.atomic_add(reinterpret_cast<float*>(p.out + 1), 0.25f);
    p.out[3] = shared.before;
  }
};

TEST("atomic_add, fence") {
  constexpr int64_t kBlocks = 20;
  const auto in = random_words(kBlocks * 64);
  const auto out = words_of<WordKernel<Counts>>(in, 4 + kBlocks * 64, kBlocks);
  uint32_t sum = 0;
  for (const uint32_t word : in) sum += word;
  CHECK_EQ(out[0], 0xdeadbeef + static_cast<uint32_t>(kBlocks));
  CHECK_EQ(out[1], bits_of(1.75f));
  CHECK_EQ(out[2], sum);
  CHECK_EQ(out[3], static_cast<uint32_t>(kBlocks) - 1);
}

struct SharedCounts {
  static constexpr int kThreads = 256;
  struct Shared {
    uint32_t words[8];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    if (unit.thread < 8) shared.words[unit.thread] = 0;
    unit.sync();
    unit.add_shared(&shared.words[p.in[unit.thread] % 8], p.in[unit.thread]);
    unit.sync();
    if (unit.thread < 8) p.out[unit.thread] = shared.words[unit.thread];
    unit.add_global(reinterpret_cast<uint64_t*>(p.out + 8), uint64_t{1} << 32);
  }
};

TEST("add_shared, add_global") {
  const auto in = random_words(256);
  std::vector<uint32_t> sums(10);
  for (const uint32_t word : in) sums[word % 8] += word;
  sums[8] = 0xdeadbeef;
  sums[9] = 0xdeadbeef + 256;
  CHECK(words_of<WordKernel<SharedCounts>>(in, 10) == sums);
}

struct Numbers {
  static constexpr int kThreads = 32;
  using Shared = Nothing;
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared&) {
    const uint32_t* in = p.in + unit.lane * 3;
    uint32_t* out = p.out + unit.lane * 12;
    const float a = float_of(in[0]);
    const float b = float_of(in[1]);
    out[0] = unit.bf16x2(a, b);
    out[1] = unit.f16x2(a, b);
    out[2] = bits_of(unit.from_f16(static_cast<uint16_t>(in[2])));
    out[3] = bits_of(unit.mul(a, b) + a);  // two roundings
    out[4] = unit.fma_bf16x2(out[0], 0x40403f80u, 0xbf800000u);
    out[5] = unit.permute(in[0], in[1], in[2] & 0x7777u);
    out[6] = bits_of(unit.exp2(a));
    out[7] = bits_of(unit.reciprocal(a));
    out[8] = unit.fma_f16x2(out[1], 0x5c004200u, 0xbc00u);
    out[9] = static_cast<uint32_t>(unit.popcount(in[0]));
    out[10] = static_cast<uint32_t>(unit.lowest_bit(in[0]));
    out[11] = unit.rotate(in[0], unit.kept(unit.lane) - 16);
  }
};

// Within 4 units in the last place, of what may be infinite, and 0 below the normal numbers.
bool is_close(float got, double expected) {
  if (std::abs(expected) < 0x1p-126) return got == 0.0f;
  if (std::abs(expected) >= 0x1p128) return std::isinf(got) && std::signbit(got) == (expected < 0);
  return std::abs(got - expected) <= 4 * 0x1p-23 * std::abs(expected);
}

TEST("conversions, mul, fma, permute, exp2, reciprocal, popcount, lowest_bit, rotate") {
  std::vector<float> numbers = {1 + 0x1p-8f, 1 + 3 * 0x1p-8f, -2.0f, 0x1p-133f, 3.4e38f, 65519.9f,
                                65520.0f,    0x1p-25f,        0.1f,  -0.0f,     1e-6f,   7.0f};
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  while (numbers.size() < 64) numbers.push_back(normal(random));
  std::vector<uint32_t> in;
  for (size_t lane = 0; lane < 32; ++lane) {
    in.push_back(bits_of(numbers[lane * 2]));
    in.push_back(bits_of(numbers[lane * 2 + 1]));
    in.push_back(static_cast<uint32_t>(random()) & 0x7bff);  // finite as float16
  }
  const auto out = words_of<WordKernel<Numbers>>(in, 32 * 12);
  for (size_t lane = 0; lane < 32; ++lane) {
    const float a = numbers[lane * 2];
    const float b = numbers[lane * 2 + 1];
    const uint32_t* got = out.data() + lane * 12;
    CHECK_EQ(got[0], uint32_t{f32_to_bf16(a)} | uint32_t{f32_to_bf16(b)} << 16);
    CHECK_EQ(got[1], uint32_t{f32_to_f16(a)} | uint32_t{f32_to_f16(b)} << 16);
    CHECK_EQ(got[2], bits_of(f16_to_f32(static_cast<uint16_t>(in[lane * 3 + 2]))));
    const volatile float product = a * b;
    CHECK_EQ(float_of(got[3]), product + a);
    const float low = bf16_to_f32(static_cast<uint16_t>(got[0]));
    const float high = bf16_to_f32(static_cast<uint16_t>(got[0] >> 16));
    CHECK_EQ(got[4],
             uint32_t{f32_to_bf16(low)} | uint32_t{f32_to_bf16(std::fma(high, 3.0f, -1.0f))} << 16);
    // 3 x - 1, and 2^8 x: also of subnormal numbers.
    const float low_half = f16_to_f32(static_cast<uint16_t>(got[1]));
    const float high_half = f16_to_f32(static_cast<uint16_t>(got[1] >> 16));
    CHECK_EQ(got[8], uint32_t{f32_to_f16(std::fma(low_half, 3.0f, -1.0f))} |
                         uint32_t{f32_to_f16(std::fma(high_half, 256.0f, 0.0f))} << 16);
    const uint64_t bytes = uint64_t{in[lane * 3 + 1]} << 32 | in[lane * 3];
    for (int i = 0; i < 4; ++i) {
      const uint32_t pick = in[lane * 3 + 2] >> 4 * i & 7;
      CHECK_EQ(got[5] >> 8 * i & 0xff, bytes >> 8 * pick & 0xff);
    }
    CHECK_EQ(got[9], static_cast<uint32_t>(std::popcount(in[lane * 3])));
    CHECK_EQ(got[10], static_cast<uint32_t>(std::countr_zero(in[lane * 3])));
    CHECK_EQ(got[11], std::rotl(in[lane * 3], static_cast<int>(lane) - 16));
    CHECK(is_close(float_of(got[6]), std::exp2(double{a})));
    // Subnormal numbers and zeros alike are 0.
    CHECK(is_close(float_of(got[7]), 1.0 / (std::abs(a) < 0x1p-126f ? std::copysign(0.0, a) : a)));
  }
}

}  // namespace
}  // namespace effinfer::cuda

CHECK_MAIN()
