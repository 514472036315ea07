// The tile registers of AMX as a small vocabulary. Kernels are templates over it: what runs is
// NativeTiles; a tile unit in plain C++ with the same members proves them where the CPU has none.
//
//   configure(config)   ldtilecfg; zeroes all tiles. Once in a region of a thread: it costs as much
//                       as ten multiplications
//   zero<t>()  load<t>(from, stride)  store<t>(to, stride)
//   dpbf16ps<c, a, b>() c[m][n] += sum over 32 k of a[m][k] b[k / 2][n][k % 2]
//   dpbsud<c, a, b>()   c[m][n] += sum over 64 k of a[m][k] b[k / 4][n][k % 4], int32 += int8 *
//   uint8 release()           gives the state back, which lets the kernel of the system skip it
#pragma once

#include <cstddef>
#include <cstdint>

namespace effinfer::cpu {
namespace {

inline constexpr int kTileRows = 16;
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;
inline constexpr int64_t kTileK = 32;  // bfloat16 values in a row

// What ldtilecfg reads: palette 1, 8 tiles of up to 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};  // the upper halves of both arrays are reserved
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64 && offsetof(TileConfig, row_bytes) == 16 &&
              offsetof(TileConfig, rows) == 48);

#if defined(__AMX_BF16__)

// Not the compiler's intrinsics: those of GCC 12 are macros that paste a literal tile number into
// the text, so no template argument fits; they tell the compiler of 8 bytes read by ldtilecfg and
// of none read by tileloadd, so that it drops or delays the stores to the rest.
struct NativeTiles {
  [[gnu::always_inline]] static void configure(const TileConfig& config) {
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  [[gnu::always_inline]] static void release() { __asm__ volatile("tilerelease" ::: "memory"); }

  template <int tile>
  [[gnu::always_inline]] static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile));
  }

  template <int tile>
  [[gnu::always_inline]] static void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile)
                     : "memory");
  }

  template <int tile>
  [[gnu::always_inline]] static void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
  }

  template <int c, int a, int b>
  [[gnu::always_inline]] static void dpbf16ps() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  }

  template <int c, int a, int b>
  [[gnu::always_inline]] static void dpbsud() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  }
};

#endif

}  // namespace
}  // namespace effinfer::cpu
