// The tile unit of AMX in plain C++, with the semantics of the Intel 64 manual (volume 2,
// TDPBF16PS): products of even and of odd k run in two chains of fused multiply-adds from zero, the
// chains are added, then the destination. All of it rounds to nearest even, takes denormals as
// zeros and flushes results to zero, whatever MXCSR says. What raises #UD there is refused.
//
// Compiled with FMA (a helper of a test, never a part of the library).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/vectors/amx_tiles.h"
#include "emulated_amx.h"

namespace effinfer::cpu {
namespace {

class EmulatedTiles {
 public:
  void configure(const TileConfig& config) {
    expect(config.palette == 1 && config.start_row == 0, "palette 1 and start row 0");
    for (int tile = 0; tile < 8; ++tile) {
      expect(config.rows[tile] <= kTileRows && config.row_bytes[tile] <= kTileRowBytes,
             "tiles of up to 16 x 64 bytes");
    }
    config_ = config;
    std::memset(tiles_, 0, sizeof(tiles_));
  }

  void release() { config_ = TileConfig{}; }

  template <int tile>
  void zero() {
    expect_configured(tile);
    std::memset(&tiles_[tile], 0, sizeof(Tile));
  }

  template <int tile>
  void load(const void* from, int64_t stride) {
    zero<tile>();
    for (int m = 0; m < config_.rows[tile]; ++m) {
      std::memcpy(tiles_[tile].row[m], static_cast<const uint8_t*>(from) + m * stride,
                  config_.row_bytes[tile]);
    }
  }

  template <int tile>
  void store(void* to, int64_t stride) const {
    expect_configured(tile);
    for (int m = 0; m < config_.rows[tile]; ++m) {
      std::memcpy(static_cast<uint8_t*>(to) + m * stride, tiles_[tile].row[m],
                  config_.row_bytes[tile]);
    }
  }

  template <int c, int a, int b>
  void dpbsud() {
    expect_fitting<c, a, b>();
    for (int m = 0; m < config_.rows[c]; ++m) {
      int32_t sums[16];
      std::memcpy(sums, tiles_[c].row[m], sizeof(sums));
      for (int n = 0; n < config_.row_bytes[c] / 4; ++n) {
        for (int k = 0; k < 4 * config_.rows[b]; ++k) {
          sums[n] += static_cast<int8_t>(tiles_[a].row[m][k]) * tiles_[b].row[k / 4][4 * n + k % 4];
        }
      }
      std::memcpy(tiles_[c].row[m], sums, sizeof(sums));
    }
  }

  template <int c, int a, int b>
  void dpbf16ps() {
    expect_fitting<c, a, b>();
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // no exceptions, nearest even, flush to zero, denormals are zeros
    multiply(tiles_[c], tiles_[a], tiles_[b], config_.rows[c], config_.rows[b],
             config_.row_bytes[c] / 4);
    _mm_setcsr(saved);
  }

 private:
  struct alignas(64) Tile {
    uint8_t row[kTileRows][kTileRowBytes];
  };

  static void expect(bool condition, const char* what) {
    if (!condition) emulated::refuse(what);
  }

  void expect_configured(int tile) const {
    expect(config_.rows[tile] > 0 && config_.row_bytes[tile] > 0, "a configured tile");
  }

  template <int c, int a, int b>
  void expect_fitting() const {
    static_assert(c != a && c != b && a != b);
    expect(config_.row_bytes[c] % 4 == 0 && config_.row_bytes[a] % 4 == 0, "rows of whole dwords");
    expect(config_.rows[c] == config_.rows[a], "as many rows of c as of a");
    expect(config_.row_bytes[c] == config_.row_bytes[b], "rows of c as long as those of b");
    expect(config_.row_bytes[a] / 4 == config_.rows[b],
           "as many rows of b as dwords in a row of a");
    for (const int tile : {c, a, b}) expect_configured(tile);
  }

  // The upper and the lower bfloat16 of dwords as floats.
  static void widen(const uint8_t* row, float* even, float* odd) {
    uint32_t dwords[16];
    std::memcpy(dwords, row, sizeof(dwords));
    for (uint32_t& dword : dwords) {
      const uint32_t low = dword << 16;
      const uint32_t high = dword & 0xffff0000u;
      std::memcpy(even++, &low, 4);
      std::memcpy(odd++, &high, 4);
    }
  }

  // Not inlined: no operation may leave the stretch in which MXCSR is set.
  [[gnu::noinline]] static void multiply(Tile& c, const Tile& a, const Tile& b, int rows, int pairs,
                                         int cols) {
    float b_even[kTileRows][16];
    float b_odd[kTileRows][16];
    for (int k = 0; k < pairs; ++k) widen(b.row[k], b_even[k], b_odd[k]);
    for (int m = 0; m < rows; ++m) {
      float a_even[16];
      float a_odd[16];
      widen(a.row[m], a_even, a_odd);
      float even[16] = {};
      float odd[16] = {};
      for (int k = 0; k < pairs; ++k) {
        for (int n = 0; n < 16; ++n) {
          even[n] = __builtin_fmaf(a_even[k], b_even[k][n], even[n]);
          odd[n] = __builtin_fmaf(a_odd[k], b_odd[k][n], odd[n]);
        }
      }
      float sums[16];
      std::memcpy(sums, c.row[m], sizeof(sums));
      for (int n = 0; n < 16; ++n) sums[n] = n < cols ? sums[n] + (even[n] + odd[n]) : 0.0f;
      std::memcpy(c.row[m], sums, sizeof(sums));
    }
  }

  TileConfig config_;
  Tile tiles_[8];
};

}  // namespace
}  // namespace effinfer::cpu
