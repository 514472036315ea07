// Ternary matmul on tiles of AMX, over any tile unit (amx_tiles.h): panels of digits are B tiles as
// they lie (16 dword lines each) and rows of the operand are A tiles. Decoding to panels bounds few
// tokens, which lines in vectors may serve faster: what is measured decides (core/tuned.h).
//
// Two row tiles and two groups make four C tiles: 32 tokens x 32 outputs, 64 k a step of 4 loads
// and 4 multiplications. Bound, estimated: 4 x 16 cycles a step, 256 a block of k, and about 200
// to decode the two groups of it, which up to 128 tokens share.
#pragma once

#include "core/tuned.h"
#include "cpu/level.h"
#include "cpu/vectors/amx_tiles.h"
#include "cpu/vectors/matmul_ternary.h"
#include "cpu/vectors/ternary_dot_avx512.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Tiles>
class TernaryAmx : public TernaryDot {
 public:
  static constexpr int kTokens = 2 * kTileRows;
  static constexpr bool kWholeTiles = true;
  template <QuantBits bits>
  int line_tokens() const {
    return bits == QuantBits::t2 ? t2_lines_ : t1_6_lines_;
  }

  static void run(const ops::MatmulProblem& problem, Team& team) {
    TernaryAmx dot(problem.x.rows);
    TernaryMatmul<TernaryAmx>::run(problem, team, dot);
    dot.tiles_.release();
  }

  void multiply(const uint8_t* const* panels, int dwords, const int8_t* q, int64_t stride,
                int tokens, int32_t (*sums)[32]) {
    if (tokens == 2 * kTileRows) return multiply_tiles<2>(panels, dwords, q, stride, sums);
    for (int t = 0; t < tokens; t += tile_rows_) {
      if (tokens - t >= tile_rows_) {
        multiply_tiles<1>(panels, dwords, q + t * stride, stride, sums + t);
      } else {
        multiply_rest(panels, dwords, q + t * stride, stride, tokens - t, sums + t);
      }
    }
  }

 private:
  explicit TernaryAmx(int64_t tokens)
      : tile_rows_(tokens < kTileRows ? static_cast<int>(tokens) : kTileRows) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = kTileRowBytes;
      config.rows[tile] = tile >= kB ? kTileRows : static_cast<uint8_t>(tile_rows_);
    }
    tiles_.configure(config);
  }

  // Tiles: C 0..3 (row tile, group), A 4..5, B 6..7.
  static constexpr int kA = 4;
  static constexpr int kB = 6;

  template <int rows>
  void multiply_tiles(const uint8_t* const* panels, int dwords, const int8_t* q, int64_t stride,
                      int32_t (*sums)[32]) {
    unroll<rows * 2>([&](auto i) __attribute__((always_inline)) {
      tiles_.template load<i>(sums[i / 2 * kTileRows] + i % 2 * 16, sizeof(*sums));
    });
    for (int n = 0; n < dwords; n += kTileRows) {
      unroll<2>([&](auto g) __attribute__((always_inline)) {
        tiles_.template load<kB + g>(panels[g] + n * kTileRowBytes, kTileRowBytes);
      });
      unroll<rows>([&](auto r) __attribute__((always_inline)) {
        tiles_.template load<kA + r>(q + r * kTileRows * stride + 4 * n, stride);
        tiles_.template dpbsud<2 * r, kA + r, kB>();
        tiles_.template dpbsud<2 * r + 1, kA + r, kB + 1>();
      });
    }
    unroll<rows * 2>([&](auto i) __attribute__((always_inline)) {
      tiles_.template store<i>(sums[i / 2 * kTileRows] + i % 2 * 16, sizeof(*sums));
    });
  }

  // Fewer rows than the tiles are configured for: from a copy, since what follows may not exist.
  void multiply_rest(const uint8_t* const* panels, int dwords, const int8_t* q, int64_t stride,
                     int tokens, int32_t (*sums)[32]) {
    alignas(64) int8_t rows[kTileRows][ops::kTernaryBlock] = {};
    alignas(64) int32_t out[kTileRows][32] = {};
    for (int t = 0; t < tokens; ++t) {
      std::memcpy(rows[t], q + t * stride, static_cast<size_t>(4 * dwords));
      std::memcpy(out[t], sums[t], sizeof(out[t]));
    }
    multiply_tiles<1>(panels, dwords, rows[0], ops::kTernaryBlock, out);
    std::memcpy(sums, out, static_cast<size_t>(tokens) * sizeof(out[0]));
  }

  Tiles tiles_;
  int tile_rows_;
  const int t2_lines_ = line_rows(PackedTernary::t2, 1);
  const int t1_6_lines_ = line_rows(PackedTernary::t1_6, 1);
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
