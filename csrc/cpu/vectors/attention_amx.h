// The two products of attention on tiles of AMX, over any tile unit (amx_tiles.h).
//
//            32 of dim or tokens         16 columns  16 columns
//         +----------------------+      +---------+ +---------+
//   A0    | r x 32 rows of pairs |   B0 | 16 lines| |         | B1   lines as they lie in a page
//         +----------------------+      +---------+ +---------+
//   A1    | r x 32               |       C00 += A0 B0  C01 += A0 B1
//         +----------------------+       C10 += A1 B0  C11 += A1 B1
//
// Rows are queries or probabilities as bfloat16 pairs. They are cut into the fewest tiles and these
// made equally high (45 rows: 3 x 15), since a multiplication takes a cycle for each row of A; the
// few rows that the last tile has too many are memory of the caller's and nobody's results. An odd
// tile of rows meets four tiles of columns where there are as many: that is still four independent
// chains of C, whose latency is 52 cycles beside 16 for a multiplication.
//
// A result depends on its own row and on the place of 32 tokens in the page: a row has the same
// bits in any tile, alone or among others, as with the products in vector registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vectors/amx_tiles.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/kv_avx512bf16.h"
#include "cpu/vectors/packed_avx512.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Tiles>
class AmxProducts {
 public:
  using Math = AttentionMath<KvBf16Pairs>;
  using Lines = Math::Lines;
  using V = Math::V;
  static constexpr bool kTiles = true;
  static constexpr int64_t kKeyStep = kTileK;
  static constexpr int64_t kValueStep = kTileK;

  static int64_t padded_rows(int64_t rows) { return tile_rows(rows) * num_tiles(rows); }

  // `spare` is for spare_floats(dim).
  AmxProducts(int64_t rows, float* spare) : tile_rows_(tile_rows(rows)), spare_(spare) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = kTileRowBytes;
      config.rows[tile] = tile >= kB ? kTileRows : static_cast<uint8_t>(tile_rows_);
    }
    tiles_.configure(config);
  }
  void release() { tiles_.release(); }

  // A whole tile of rows.
  int64_t band_rows() const { return tile_rows_; }

  // As AttentionMath::product_all, but `columns` is even, rows begin at a multiple of band_rows()
  // of the constructor's, and those of `a` are finite up to the next multiple of 32 behind `depth`.
  void multiply(const uint32_t* a, int64_t a_stride, const Lines& b, int64_t depth,
                const float* factors, float* c, int64_t c_stride, int64_t columns, int64_t rows) {
    if (factors != nullptr) rescale(factors, c, c_stride, columns, rows);
    if (depth % kTileK > 0) copy_tail(b, depth, columns);
    Operands operands = {reinterpret_cast<const uint8_t*>(a),
                         a_stride * 4,
                         b,
                         depth,
                         c,
                         c_stride,
                         factors != nullptr};
    int64_t left = (rows + tile_rows_ - 1) / tile_rows_;
    for (; left >= 2; left -= 2) {
      take<2, 2>(operands, 0, columns);
      operands.a += 2 * tile_rows_ * operands.a_stride;
      operands.c += 2 * tile_rows_ * c_stride;
    }
    if (left == 0) return;
    take<1, 4>(operands, 0, columns / 4 * 4);
    take<1, 2>(operands, columns / 4 * 4, columns);
  }

 private:
  // Tiles: C 0..3, A 4..5, B 6..7.
  static constexpr int kA = 4;
  static constexpr int kB = 6;

  struct Operands {
    const uint8_t* a;
    int64_t a_stride;  // bytes
    Lines b;
    int64_t depth;
    float* c;
    int64_t c_stride;
    bool add;
  };

  static int64_t num_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
  static int64_t tile_rows(int64_t rows) {
    const int64_t tiles = num_tiles(rows);
    return (rows + tiles - 1) / tiles;
  }

  // Most pages bring no new maximum: their factors are exactly 1.
  static void rescale(const float* factors, float* c, int64_t stride, int64_t columns,
                      int64_t rows) {
    for (int64_t row = 0; row < rows; ++row, c += stride) {
      if (factors[row] == 1.0f) continue;
      const V factor = V::set(factors[row]);
      for (int64_t i = 0; i < columns * 16; i += 16) (V::load(c + i) * factor).store(c + i);
    }
  }

  // The lines from the last multiple of 32 to `depth`, a tile for each column, zeros behind them:
  // what lies there in the page may be no numbers.
  void copy_tail(const Lines& b, int64_t depth, int64_t columns) {
    const int64_t count = depth % kTileK;
    const uint8_t* from = b.data + depth / kTileK * kTileRows * b.step;
    auto* to = reinterpret_cast<uint8_t*>(spare_);
    for (int64_t n = 0; n < columns; ++n, from += b.stride, to += kTileBytes) {
      for (int64_t i = 0; i < count; i += 2) {
        const auto line =
            KvBf16Pairs::load(from + i / 2 * b.step, static_cast<int>(count - i < 2 ? 1 : 2));
        _mm512_storeu_si512(to + i / 2 * kTileRowBytes, (__m512i)line);
      }
      const int64_t filled = (count + 1) / 2 * kTileRowBytes;
      std::memset(to + filled, 0, static_cast<size_t>(kTileBytes - filled));
    }
  }

  // Columns [first, end) of R tiles of rows, N at a time.
  template <int R, int N>
  void take(const Operands& o, int64_t first, int64_t end) {
    const uint8_t* next = o.b.next + first * (o.depth / kTileK) * kTileBytes;
    for (int64_t column = first; column < end; column += N) {
      float* c = o.c + column * 16;
      unroll<R * N>([&](auto i) __attribute__((always_inline)) {
        if (o.add) {
          tiles_.template load<i>(c + i / N * tile_rows_ * o.c_stride + i % N * 16, o.c_stride * 4);
        } else {
          tiles_.template zero<i>();
        }
      });
      const uint8_t* b = o.b.data + column * o.b.stride;
      int64_t k = 0;
      for (; k + kTileK <= o.depth; k += kTileK) {
        prefetch<N>(next);
        step<R, N>(o, k, b, o.b.step, o.b.stride);
        b += kTileRows * o.b.step;
      }
      if (k < o.depth) {
        step<R, N>(o, k, reinterpret_cast<const uint8_t*>(spare_) + column * kTileBytes,
                   kTileRowBytes, kTileBytes);
      }
      unroll<R * N>([&](auto i) __attribute__((always_inline)) {
        tiles_.template store<i>(c + i / N * tile_rows_ * o.c_stride + i % N * 16, o.c_stride * 4);
      });
    }
  }

  template <int R, int N>
  [[gnu::always_inline]] void step(const Operands& o, int64_t k, const uint8_t* b, int64_t b_step,
                                   int64_t b_stride) {
    unroll<R>([&](auto r) __attribute__((always_inline)) {
      tiles_.template load<kA + r>(o.a + r * tile_rows_ * o.a_stride + k * 2, o.a_stride);
    });
    unroll<N>([&](auto n) __attribute__((always_inline)) {
      tiles_.template load<kB + n % 2>(b + n * b_stride, b_step);
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        tiles_.template dpbf16ps<r * N + n, kA + r, kB + n % 2>();
      });
    });
  }

  // As many lines as a step takes, in the order of addresses.
  template <int N>
  [[gnu::always_inline]] static void prefetch(const uint8_t*& next) {
    for (int64_t i = 0; i < N * kTileRows; ++i) __builtin_prefetch(next + i * Math::kLine, 0, 2);
    next += N * kTileBytes;
  }

  const int64_t tile_rows_;
  float* const spare_;
  Tiles tiles_;
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
