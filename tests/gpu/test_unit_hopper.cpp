// As test_unit.cpp: what only Hopper has.
#include <algorithm>
#include <cstdint>
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

// Warps 0 and 1 read what 2 and 3 wrote, and then write what 2 and 3 read.
struct SomeWarps {
  static constexpr int kThreads = 160;
  struct Shared {
    uint32_t words[64];
    uint32_t back[64];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    if (unit.warp == 4) {
      p.out[unit.thread] = 5;
      return;
    }
    if (unit.warp >= 2) {
      shared.words[unit.thread - 64] = p.in[unit.thread - 64];
      unit.arrive_some(3, 128);
      unit.sync_some(15, 128);
      p.out[unit.thread] = shared.back[127 - unit.thread];
    } else {
      unit.sync_some(3, 128);
      shared.back[unit.thread] = shared.words[63 - unit.thread] + 1;
      unit.sync_some(15, 128);
      p.out[unit.thread] = shared.back[63 - unit.thread];
    }
  }
};

TEST("sync_some, arrive_some") {
  const OnHopper machine;
  const auto in = random_words(64);
  const auto out = words_of<HopperKernel<SomeWarps>>(in, 160);
  for (uint32_t i = 0; i < 64; ++i) {
    CHECK_EQ(out[i], in[i] + 1);
    CHECK_EQ(out[64 + i], in[i] + 1);
  }
  CHECK_EQ(out[159], 5u);
}

// A warp brings 256 bytes at a time through two places, which another one adds up.
struct Ring {
  static constexpr int kThreads = 64;
  static constexpr int kRounds = 7;
  struct Shared {
    alignas(16) uint32_t words[2][64];
    Mbarrier full[2];
    Mbarrier empty[2];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    if (unit.thread == 0) {
      for (int i = 0; i < 2; ++i) {
        unit.barrier_init(shared.full[i], 1);
        unit.barrier_init(shared.empty[i], 32);
      }
      unit.fence_async();
    }
    unit.sync();
    if (unit.warp == 0) {
      if (unit.lane > 0) return;
      for (int i = 0; i < kRounds; ++i) {
        unit.barrier_wait(shared.empty[i % 2], (i / 2 & 1) ^ 1);
        unit.barrier_arrive_expect(shared.full[i % 2], 256);
        unit.copy_bulk(shared.words[i % 2], p.in + i * 64, 96, shared.full[i % 2]);
        unit.copy_bulk(shared.words[i % 2] + 24, p.in + i * 64 + 24, 160, shared.full[i % 2]);
      }
      return;
    }
    uint32_t sum = 0;
    for (int i = 0; i < kRounds; ++i) {
      unit.barrier_wait(shared.full[i % 2], i / 2 & 1);
      sum = sum * 3 + shared.words[i % 2][unit.lane] + shared.words[i % 2][63 - unit.lane];
      unit.barrier_arrive(shared.empty[i % 2]);
    }
    p.out[unit.lane] = sum;
  }
};

TEST("barrier_init, barrier_arrive, barrier_arrive_expect, barrier_wait, copy_bulk") {
  const OnHopper machine;
  const auto in = random_words(Ring::kRounds * 64);
  const auto out = words_of<HopperKernel<Ring>>(in, 32);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < Ring::kRounds; ++i) {
      sum = sum * 3 + in[i * 64 + lane] + in[i * 64 + 63 - lane];
    }
    CHECK_EQ(out[lane], sum);
  }
}

// Copies the box at (in[0], in[1]) of a matrix and gives it as it lies.
template <int kBytes>
struct Tile {
  static constexpr int kThreads = 32;
  struct Shared {
    alignas(1024) uint32_t words[kBytes / 4];
    Mbarrier full;
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    if (unit.thread == 0) {
      unit.barrier_init(shared.full, 1);
      unit.fence_async();
      unit.barrier_arrive_expect(shared.full, kBytes);
      unit.copy_tile(shared.words, p.map, static_cast<int>(p.in[0]), static_cast<int>(p.in[1]),
                     shared.full);
    }
    unit.sync();
    unit.barrier_wait(shared.full, 0);
    for (int i = unit.lane; i < kBytes / 4; i += 32) p.out[i] = shared.words[i];
  }
};

// What lies there: rows of the box one after the other, in 16 bytes each of which the place is
// drawn in the CUDA programming guide's tables of swizzle modes.
template <int kRows, int kCols>
void check_tile(Swizzle swizzle, int row, int col) {
  const OnHopper machine;
  constexpr int kMatrixRows = 37;
  constexpr int kMatrixCols = 100;
  constexpr int kStride = 104;  // numbers
  auto words = random_words(kMatrixRows * kStride / 2);
  // The first numbers say where.
  words[0] = static_cast<uint32_t>(col);
  words[1] = static_cast<uint32_t>(row);
  const TileSource source{nullptr, kMatrixRows, kMatrixCols, kStride * 2, kRows, kCols, swizzle};
  constexpr int kBytes = kRows * kCols * 2;
  const auto out = words_of<HopperKernel<Tile<kBytes>>>(words, kBytes / 4, 1, &source);
  const auto number = [](const std::vector<uint32_t>& of, int i) {
    return of[static_cast<size_t>(i / 2)] >> 16 * (i % 2) & 0xffff;
  };
  constexpr int kPieces = kCols / 8;
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) {
      const int piece = c / 8;
      const int place = swizzle == Swizzle::bytes128  ? piece ^ r % 8
                        : swizzle == Swizzle::bytes64 ? piece ^ r / 2 % 4
                        : swizzle == Swizzle::bytes32 ? piece ^ r / 4 % 2
                                                      : piece;
      const bool inside = row + r < kMatrixRows && col + c < kMatrixCols && col + c >= 0;
      CHECK_EQ(number(out, (r * kPieces + place) * 8 + c % 8),
               inside ? number(words, (row + r) * kStride + col + c) : 0u);
    }
  }
}

TEST("copy_tile, as it lies and with each swizzle, and beyond the ends") {
  check_tile<16, 64>(Swizzle::bytes128, 0, 0);
  check_tile<24, 64>(Swizzle::bytes128, 20, 64);
  check_tile<16, 32>(Swizzle::bytes64, 8, 32);
  check_tile<16, 16>(Swizzle::bytes32, 3, 96);
  check_tile<8, 128>(Swizzle::none, 30, 0);
  check_tile<8, 32>(Swizzle::none, 2, -8);
}

// Each lane copies a box of two rows and a run of bytes of its own. They may all be there before
// another copy is, which is waited for, and are announced behind that: no phase ends until then.
struct LaneCopies {
  static constexpr int kThreads = 32;
  static constexpr int kRows = 2;
  static constexpr int kCols = 64;
  struct Shared {
    alignas(128) uint32_t boxes[32][kRows * kCols / 2];
    alignas(16) uint32_t runs[32][12];
    alignas(16) uint32_t another[64];
    Mbarrier full;
    Mbarrier other;
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    if (unit.lane == 0) {
      unit.barrier_init(shared.full, 1);
      unit.barrier_init(shared.other, 1);
    }
    unit.fence_async();
    unit.sync_warp();
    for (int phase = 0; phase < 2; ++phase) {
      const int lane = unit.lane ^ phase;
      unit.copy_tile(shared.boxes[unit.lane], p.map, lane % 2 * kCols, lane * kRows, shared.full);
      unit.copy_bulk(shared.runs[unit.lane], p.in + lane * 12, 48, shared.full);
      if (unit.lane == 0) {
        unit.barrier_arrive_expect(shared.other, sizeof shared.another);
        unit.copy_bulk(shared.another, p.in, sizeof shared.another, shared.other);
      }
      unit.barrier_wait(shared.other, phase);
      if (unit.lane == 0) {
        unit.barrier_arrive_expect(shared.full, sizeof shared.boxes + sizeof shared.runs);
      }
      unit.barrier_wait(shared.full, phase);
      for (int i = 0; i < kRows * kCols / 2; ++i) {
        uint32_t* const out = p.out + phase * 32 * kRows * kCols / 2;
        out[i * 32 + unit.lane] = shared.boxes[unit.lane][i] + shared.runs[unit.lane][i % 12];
      }
      unit.sync_warp();  // all have read what comes over it
    }
  }
};

TEST("copies of all lanes, and before they are announced") {
  const OnHopper machine;
  constexpr int kRows = LaneCopies::kRows;
  constexpr int kWords = LaneCopies::kCols / 2;  // of a box's row, of two of the matrix
  const auto in = random_words(32 * kRows * 2 * kWords);
  const TileSource source{nullptr, 32 * kRows, 4 * kWords,   8 * kWords,
                          kRows,   2 * kWords, Swizzle::none};
  constexpr size_t kOut = 32 * kRows * kWords;
  const auto out = words_of<HopperKernel<LaneCopies>>(in, 2 * kOut, 1, &source);
  for (int phase = 0; phase < 2; ++phase) {
    for (int i = 0; i < kRows * kWords; ++i) {
      for (int own = 0; own < 32; ++own) {
        const int lane = own ^ phase;
        const int row = lane * kRows + i / kWords;
        const auto at = static_cast<size_t>(row * 2 * kWords + lane % 2 * kWords + i % kWords);
        CHECK_EQ(out[static_cast<size_t>(phase) * kOut + static_cast<size_t>(i * 32 + own)],
                 in[at] + in[static_cast<size_t>(lane * 12 + i % 12)]);
      }
    }
  }
}

// --- wgmma

// Where number (row, k) of a tile of up to 256 rows and 16 k lies, in numbers, by the figures of
// the PTX ISA's "Shared memory layout" of wgmma: the places that `leading` and `stride` name are
// larger than need be.
struct TileLayout {
  Swizzle swizzle;
  bool transposed;

  constexpr int width() const {
    return swizzle == Swizzle::none      ? 8
           : swizzle == Swizzle::bytes32 ? 16
           : swizzle == Swizzle::bytes64 ? 32
                                         : 64;
  }
  // Bytes. Tiles with k along their rows: 16 k of 64 are used, or pieces lie apart.
  [[maybe_unused]] constexpr int leading() const {
    if (!transposed) return swizzle == Swizzle::none ? 256 * 16 : 16;
    return swizzle == Swizzle::none ? 128 : 2 * 8 * width() * 2;
  }
  [[maybe_unused]] constexpr int stride() const {
    if (!transposed) return 8 * width() * 2;
    return swizzle == Swizzle::none ? 256 : 8 * width() * 2;
  }
  [[maybe_unused]] constexpr int place(int row, int k) const {
    const int w = width();
    if (!transposed && swizzle == Swizzle::none) {
      return row / 8 * 64 + row % 8 * 8 + k / 8 * (256 * 8) + k % 8;
    }
    if (!transposed) return row * w + ((k / 8 ^ changed(row)) * 8) + k % 8;
    if (swizzle == Swizzle::none) return row / 8 * 128 + k / 8 * 64 + k % 8 * 8 + row % 8;
    // Rows of memory are k: 16 of them with w numbers, then the next w.
    return row / w * (16 * w) + k * w + ((row % w / 8 ^ changed(k)) * 8) + row % 8;
  }
  constexpr int changed(int memory_row) const {
    return swizzle == Swizzle::bytes128  ? memory_row % 8
           : swizzle == Swizzle::bytes64 ? memory_row / 2 % 4
                                         : memory_row / 4 % 2;
  }
};

// in: a[64][16] and b[kCols][16] as numbers of 16 bits in the upper half of words. out: d
// [64][kCols] of twice a b, or once where it is not added to.
template <int kCols, bool kF16, bool kRegisters, bool kAdds, Swizzle kSwizzle, bool kTransposed>
struct Wgmma {
  static constexpr int kThreads = 128;
  struct Shared {
    alignas(1024) uint16_t a[256 * 64];
    alignas(1024) uint16_t b[256 * 64];
  };
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared& shared) {
    constexpr TileLayout layout = {kSwizzle, kTransposed};
    for (int i = unit.thread; i < 64 * 16; i += kThreads) {
      shared.a[layout.place(i / 16, i % 16)] = static_cast<uint16_t>(p.in[i]);
    }
    for (int i = unit.thread; i < kCols * 16; i += kThreads) {
      shared.b[layout.place(i / 16, i % 16)] = static_cast<uint16_t>(p.in[1024 + i]);
    }
    unit.fence_async();
    unit.sync();
    const int row = unit.warp * 16 + unit.lane / 4;
    const int t = unit.lane % 4;
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
      const int at = (row + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
      a[i] = p.in[at] | p.in[at + 1] << 16;
    }
    float d[kCols / 2];
    for (int i = 0; i < kCols / 2; ++i) d[i] = 1000.0f;
    const uint64_t tile_a = unit.descriptor(shared.a, layout.leading(), layout.stride(), kSwizzle);
    const uint64_t tile_b = unit.descriptor(shared.b, layout.leading(), layout.stride(), kSwizzle);
    unit.wgmma_fence(d, a);
    multiply(unit, d, a, tile_a, tile_b, false);
    unit.wgmma_commit();
    multiply(unit, d, a, tile_a, tile_b, kAdds);
    unit.wgmma_commit();
    unit.template wgmma_wait<1>(d);
    unit.template wgmma_wait<0>(d);
    for (int i = 0; i < kCols / 2; ++i) {
      const int col = i / 4 * 8 + 2 * t + i % 2;
      p.out[(row + i / 2 % 2 * 8) * kCols + col] = bits_of(d[i]);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, float (&d)[kCols / 2], uint32_t (&a)[4],
                                       uint64_t tile_a, uint64_t tile_b, bool adds) {
    if constexpr (kRegisters && kF16) unit.template wgmma_f16<kTransposed>(d, a, tile_b, adds);
    if constexpr (kRegisters && !kF16) unit.template wgmma<kTransposed>(d, a, tile_b, adds);
    if constexpr (!kRegisters && kF16) {
      unit.template wgmma_f16<kTransposed, kTransposed>(d, tile_a, tile_b, adds);
    }
    if constexpr (!kRegisters && !kF16) {
      unit.template wgmma<kTransposed, kTransposed>(d, tile_a, tile_b, adds);
    }
  }
};

template <int kCols, bool kF16, bool kRegisters, bool kAdds = true,
          Swizzle kSwizzle = Swizzle::bytes128, bool kTransposed = false>
void check_wgmma() {
  const OnHopper machine;
  std::mt19937 random(kCols + kF16);
  std::vector<int> numbers((64 + kCols) * 16);
  std::generate(numbers.begin(), numbers.end(),
                [&] { return static_cast<int>(random() % 15) - 7; });
  std::vector<uint32_t> in;
  for (const int number : numbers) {
    const auto value = static_cast<float>(number);
    in.push_back(kF16 ? f32_to_f16(value) : f32_to_bf16(value));
  }
  using Kernel = HopperKernel<Wgmma<kCols, kF16, kRegisters, kAdds, kSwizzle, kTransposed>>;
  const auto out = words_of<Kernel>(in, 64 * kCols);
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < kCols; ++col) {
      int sum = 0;
      for (int k = 0; k < 16; ++k) {
        sum += numbers[static_cast<size_t>(row * 16 + k)] *
               numbers[static_cast<size_t>((64 + col) * 16 + k)];
      }
      CHECK_EQ(float_of(out[static_cast<size_t>(row * kCols + col)]),
               static_cast<float>(kAdds ? 2 * sum : sum));
    }
  }
}

TEST("wgmma, wgmma_fence, wgmma_commit, wgmma_wait: each width and type, a in registers or not") {
  check_wgmma<64, false, true>();
  check_wgmma<64, false, false>();
  check_wgmma<64, true, true>();
  check_wgmma<64, true, false>();
  check_wgmma<128, false, true>();
  check_wgmma<128, false, false>();
  check_wgmma<128, true, true>();
  check_wgmma<128, true, false>();
  check_wgmma<64, false, true, false>();
  check_wgmma<128, false, false, false>();
}

TEST("descriptor: each swizzle, k along rows or across") {
  check_wgmma<128, false, false, true, Swizzle::none>();
  check_wgmma<128, false, false, true, Swizzle::bytes32>();
  check_wgmma<128, false, false, true, Swizzle::bytes64>();
  check_wgmma<128, false, false, true, Swizzle::none, true>();
  check_wgmma<128, false, false, true, Swizzle::bytes32, true>();
  check_wgmma<128, false, false, true, Swizzle::bytes64, true>();
  check_wgmma<128, false, false, true, Swizzle::bytes128, true>();
  check_wgmma<64, true, true, true, Swizzle::bytes128, true>();
}

struct Registers {
  static constexpr int kThreads = 384;
  using Shared = Nothing;
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared&) {
    if (unit.warp < 8) {
      unit.template take_registers<240>();
    } else {
      unit.template give_registers<24>();
    }
    p.out[unit.thread] = static_cast<uint32_t>(unit.thread);
  }
};

TEST("take_registers, give_registers") {
  const OnHopper machine;
  const auto out = words_of<HopperKernel<Registers>>({0}, 384);
  for (uint32_t i = 0; i < 384; ++i) CHECK_EQ(out[i], i);
}

}  // namespace
}  // namespace effinfer::cuda

CHECK_MAIN()
