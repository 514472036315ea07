// Products of few query rows with keys and values of a caller where they lie, without gathering
// them first: each is read once, so that a copy of it would cost more than the product. The sums
// have the order of AttentionMath's products over gathered lines, and so the same bits.
#pragma once

#include <cstdint>

#include "cpu/vectors/attention_math.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv, class Pack>
struct RowProducts {
  using Math = AttentionMath<Kv>;
  using A = typename Math::A;
  using V = typename Kv::V;
  using Line = typename Pack::Line;  // 64 bytes: 16 dwords
  static constexpr int P = Kv::P;
  static constexpr int64_t kElement = 4 / P;  // bytes
  static constexpr int64_t kGroup = 16;       // tokens of a line of scores

  // Keys or values of a unit; `next` are those of the next unit, which are fetched meanwhile: a
  // line for each line that is used, so that requests never queue up.
  struct Rows {
    const uint8_t* const* rows;
    const uint8_t* const* next;
  };

  // What to multiply: a[r * stride] on.
  struct Factors {
    const A* data;
    int64_t stride;
  };

  // c[R][16] = a[R][dims] keys^T of 16 tokens, or with `more` added to what is in c.
  template <int R>
  static void scores(Factors a, const Rows& keys, int64_t dims, bool more, float* c,
                     int64_t c_stride) {
    V sums[R];
    for (int r = 0; r < R; ++r) sums[r] = more ? V::load(c + r * c_stride) : V::set(0.0f);
    const int64_t dwords = dims / P;
    for (int64_t d = 0; d < dwords; d += 16) {
      for (int i = 0; i < 16; ++i) prefetch<64>(keys.next[i] + d * 4, d == 0);
      Line lines[16];
      if (dwords - d >= 16) {
        Pack::template block<16>(keys.rows, d * 4, lines);
        for (int i = 0; i < 16; ++i) add_line<R>(sums, a, lines[i], P);
      } else {
        Pack::template block<8>(keys.rows, d * 4, lines);
        for (int i = 0; i < 8; ++i) add_line<R>(sums, a, lines[i], P);
      }
    }
    for (int r = 0; r < R; ++r) sums[r].store(c + r * c_stride);
  }

  // Columns [first, first + dims) of c[R] = factors * c + a[R][count] values. The next values are
  // fetched with kFetch only.
  template <int R, bool kFetch>
  static void outputs(Factors a, const Rows& values, int64_t count, int64_t first, int64_t dims,
                      const float* factors, float* c, int64_t c_stride) {
    constexpr int N = Kv::wide(R);
    int64_t at = first;
    const int64_t end = first + dims;
    for (; at + 16 * N <= end; at += 16 * N) {
      columns<R, N, kFetch>(a, values, count, at, factors, c + at, c_stride);
    }
    for (; at < end; at += 16) {
      columns<R, 1, kFetch>(a, values, count, at, factors, c + at, c_stride);
    }
  }

 private:
  // The lines of kBytes of a row, which need not begin with one.
  template <int64_t kBytes>
  [[gnu::always_inline]] static void prefetch(const uint8_t* from, bool first) {
    if (first) __builtin_prefetch(from, 0, 2);
    for (int64_t end = 64; end <= kBytes; end += 64) __builtin_prefetch(from + end - 1, 0, 2);
    if (kBytes < 64) __builtin_prefetch(from + kBytes - 1, 0, 2);
  }

  // sums[r] += a[r] times the line, and the factors' step to the next one.
  template <int R>
  [[gnu::always_inline]] static void add_line(V (&sums)[R], Factors& a, const Line& line,
                                              int count) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&line);
    if constexpr (Kv::kPairs) {
      const auto column = Kv::load(bytes, count);
      for (int r = 0; r < R; ++r) {
        sums[r] = Kv::add_products(sums[r], column, Kv::broadcast(a.data[r * a.stride]));
      }
      ++a.data;
    } else {
      V columns[P];
      Kv::expand(bytes, columns);
      for (int j = 0; j < P; ++j) {
        if (j >= count) break;
        for (int r = 0; r < R; ++r) {
          sums[r] = fma(V::set(a.data[r * a.stride + j]), columns[j], sums[r]);
        }
      }
      a.data += P;
    }
  }

  // 16 N columns of the output, from `at` on.
  template <int R, int N, bool kFetch>
  static void columns(Factors a, const Rows& values, int64_t count, int64_t at,
                      const float* factors, float* c, int64_t c_stride) {
    V sums[N][R];
    for (int n = 0; n < N; ++n) {
      for (int r = 0; r < R; ++r) {
        sums[n][r] = V::load(c + r * c_stride + n * 16) * V::set(factors[r]);
      }
    }
    const int64_t offset = at * kElement;
    const auto step = [&](int64_t t, int used) __attribute__((always_inline)) {
      const uint8_t* row[P];
      for (int j = 0; j < P; ++j) {
        row[j] = values.rows[t + j] + offset;
        if (kFetch) prefetch<16 * N * kElement>(values.next[t + j] + offset, at == 0);
      }
      const Factors first = a;
      for (int n = 0; n < N; ++n) {
        a = first;
        add_line<R>(sums[n], a, Pack::template line<P>(row, n * 16 * kElement), used);
      }
    };
    int64_t t = 0;
    for (; t + P <= count; t += P) step(t, P);
    if (t < count) step(t, static_cast<int>(count - t));
    for (int n = 0; n < N; ++n) {
      for (int r = 0; r < R; ++r) sums[n][r].store(c + r * c_stride + n * 16);
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
