// What the attention kernels are made of: the small products of a tile, the folding of partial
// results.
//
// Kv is a level's view of one KV dtype (vectors/kv_*.h): V, a vector of 16 floats; P, the elements
// in a dword; wide(rows), how many lines side by side fit the registers next to that many rows; and
//   expand(line, out)   the P vectors of a 64-byte line, which multiply floats, or with kPairs
//   load(line, count), add_products(sums, line, pair), store_pairs(values, to)
//                       lines of bfloat16 pairs as they are (`count` of them meant), which multiply
//                       queries and probabilities rounded to bfloat16, two in a dword.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/float16.h"
#include "cpu/vectors/math.h"
#include "ops/kv_layout.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// The maximum of no scores: finite, so that differences of maxima are never NaN, and far below any
// score, so that exp() of the difference is 0.
constexpr float kNoScore = -1e30f;

// Tokens that are multiplied together.
constexpr int64_t kUnit = ops::kPageSize;

// Bits [begin, end) of 64.
[[gnu::always_inline]] inline uint64_t token_bits(int64_t begin, int64_t end) {
  if (begin < 0) begin = 0;
  if (end > kUnit) end = kUnit;
  if (begin >= end) return 0;
  return ~uint64_t{0} >> (kUnit - (end - begin)) << begin;
}

// Tokens of a unit, relative to its first.
struct TokenRange {
  int64_t begin;
  int64_t end;
};

template <class Kv>
struct AttentionMath {
  using V = typename Kv::V;
  using A = std::conditional_t<Kv::kPairs, uint32_t, float>;  // what lines are multiplied by
  static constexpr int P = Kv::P;
  static constexpr int64_t kLine = 64;

  // The right-hand side of a product: lines `step` bytes apart along the inner dimension and
  // `stride` bytes apart along the columns. `next` is the same part of the next page, which is
  // fetched line by line in the order of addresses, whatever the order of use: the hardware then
  // sees one stream and joins in.
  struct Lines {
    const uint8_t* data;
    int64_t step;
    int64_t stride;
    const uint8_t* next;
  };

  // c[R][16 N] = factors * c + a[R][depth] b, or a b without factors.
  template <int R, int N>
  static void product(const A* a, int64_t a_stride, const Lines& b, int64_t depth,
                      const float* factors, float* c, int64_t c_stride) {
    V sums[R][N];
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) {
        sums[r][n] = factors == nullptr ? V::set(0.0f)
                                        : V::load(c + r * c_stride + n * 16) * V::set(factors[r]);
      }
    }
    const uint8_t* line = b.data;
    const uint8_t* next = b.next;
    const auto step = [&](int count) __attribute__((always_inline)) {
      if constexpr (Kv::kPairs) {
        typename Kv::Line columns[N];
        for (int n = 0; n < N; ++n) {
          __builtin_prefetch(next + n * kLine, 0, 2);
          columns[n] = Kv::load(line + n * b.stride, count);
        }
        for (int r = 0; r < R; ++r) {
          const auto pair = Kv::broadcast(a[r * a_stride]);
          for (int n = 0; n < N; ++n) sums[r][n] = Kv::add_products(sums[r][n], columns[n], pair);
        }
        ++a;
      } else {
        V columns[N][P];
        for (int n = 0; n < N; ++n) {
          __builtin_prefetch(next + n * kLine, 0, 2);
          Kv::expand(line + n * b.stride, columns[n]);
        }
        for (int j = 0; j < P; ++j) {
          if (j >= count) break;
          for (int r = 0; r < R; ++r) {
            const V x = V::set(a[r * a_stride + j]);
            for (int n = 0; n < N; ++n) sums[r][n] = fma(x, columns[n][j], sums[r][n]);
          }
        }
        a += P;
      }
      line += b.step;
      next += N * kLine;
    };
    for (int64_t i = 0; i < depth / P; ++i) step(P);
    if (P > 1 && depth % P > 0) step(static_cast<int>(depth % P));
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) sums[r][n].store(c + r * c_stride + n * 16);
    }
  }

  // All columns (in lines of 16) of R rows.
  template <int R>
  static void product_rows(const A* a, int64_t a_stride, Lines b, int64_t depth,
                           const float* factors, float* c, int64_t c_stride, int64_t columns) {
    constexpr int N = Kv::wide(R);
    for (; columns >= N; columns -= N) {
      product<R, N>(a, a_stride, b, depth, factors, c, c_stride);
      b.data += N * b.stride;
      b.next += N * depth / P * kLine;
      c += N * 16;
    }
    for (; columns > 0; --columns) {
      product<R, 1>(a, a_stride, b, depth, factors, c, c_stride);
      b.data += b.stride;
      b.next += depth / P * kLine;
      c += 16;
    }
  }

  static void product_all(const A* a, int64_t a_stride, const Lines& b, int64_t depth,
                          const float* factors, float* c, int64_t c_stride, int64_t columns,
                          int64_t rows) {
    while (rows > 0) {
      int64_t done = 0;
      const auto take = [&]<int R>() {
        product_rows<R>(a, a_stride, b, depth, factors, c, c_stride, columns);
        done = R;
      };
      if (rows >= 9 || rows == 6 || rows == 7) {
        take.template operator()<6>();
      } else if (rows == 8 || rows == 4) {
        take.template operator()<4>();
      } else if (rows == 5 || rows == 3) {
        take.template operator()<3>();
      } else if (rows == 2) {
        take.template operator()<2>();
      } else {
        take.template operator()<1>();
      }
      rows -= done;
      a += done * a_stride;
      c += done * c_stride;
      if (factors != nullptr) factors += done;
    }
  }

  // Element `index` on of a row of factors.
  [[gnu::always_inline]] static void store_factor(V x, float* row, int64_t index) {
    if constexpr (Kv::kPairs) {
      Kv::store_pairs(x, reinterpret_cast<uint32_t*>(row) + index / 2);
    } else {
      x.store(row + index);
    }
  }
  // Elements [index, index + 16) of what factors_at() gave.
  [[gnu::always_inline]] static V load_factor(const A* row, int64_t index) {
    if constexpr (Kv::kPairs) {
      return V::load(reinterpret_cast<const Bf16*>(row) + index);
    } else {
      return V::load(row + index);
    }
  }
  // One of them.
  static float factor(const A* row, int64_t index) {
    if constexpr (Kv::kPairs) {
      return bf16_to_f32(reinterpret_cast<const Bf16*>(row)[index].bits);
    } else {
      return row[index];
    }
  }
  static const A* factors_at(const float* row, int64_t index) {
    return reinterpret_cast<const A*>(row) + (Kv::kPairs ? index / 2 : index);
  }

  static void fill(float* p, int64_t count, float value) {
    for (int64_t i = 0; i < count; ++i) p[i] = value;
  }

  // The lanes of 16 tokens from t on whose bit of `seen` is set, else `hidden`.
  [[gnu::always_inline]] static V only(uint64_t seen, int64_t t, V x, float hidden) {
    const auto bits = static_cast<uint32_t>(seen >> t & 0xffff);
    return bits == 0xffff ? x : keep(bits, x, V::set(hidden));
  }

  static float first_lane(V x) {
    alignas(64) float lanes[16];
    x.store(lanes);
    return lanes[0];
  }

  // (max, sum, out) of what came before, and of one chunk: their combination. The maximum's own
  // side has a factor of exactly 1; a side without keys adds exact zeros.
  static void fold(float& max, float& sum, float* out, float chunk_max, float chunk_sum,
                   const float* chunk_out, int64_t dim) {
    const float highest = chunk_max > max ? chunk_max : max;
    const V a = simd::exp(V::set(max - highest));
    const V b = simd::exp(V::set(chunk_max - highest));
    max = highest;
    sum = first_lane(fma(V::set(chunk_sum), b, V::set(sum) * a));
    for (int64_t d = 0; d < dim; d += 16) {
      fma(V::load(chunk_out + d), b, V::load(out + d) * a).store(out + d);
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
