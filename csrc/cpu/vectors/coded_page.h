// The products of attention over a coded page of one head (ops/coded_pages.h), whose codes are
// multiplied as they are.
//
// A row of queries q has for a key q . (start + step c) = q . start + (q step) . c, a row of
// weights p for a dimension p . start + (p step) . c. What multiplies the codes is rounded to
// 16-bit integers that share a scale, with 2^-16 of the greatest; the sums of their products are
// exact, so that a row has the same bits in any group of rows. Rows of a group share what taking
// codes out of their rows costs.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "cpu/level.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/coded_rest.h"
#include "cpu/vectors/unroll.h"
#include "ops/coded_pages.h"
#if EFFINFER_LEVEL_PORTABLE
#include "cpu/vectors/code_products_portable.h"
#elif EFFINFER_LEVEL_AVX2
#include "cpu/vectors/code_products_avx2.h"
#else
#include "cpu/vectors/code_products_avx512.h"
#endif

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
class CodedPage {
 public:
  using Math = AttentionMath<Kv>;
  using A = typename Math::A;
  using V = typename Kv::V;

  // The data of `coded` are of one head. What lies `ahead` bytes behind the page's is fetched
  // meanwhile.
  CodedPage(const ops::CodedPages& coded, int32_t page, int64_t ahead)
      : coded_(coded), keys_(coded.head(page, 0)), ahead_(ahead) {}

  // scores[row][64] = q[row] . keys
  void score(const A* q, int64_t q_stride, int64_t rows, float* scores) const {
    const int32_t dim = coded_.head_dim;
    const Codes codes = codes_at(keys_, dim, dim);
    for_rows(rows, [&]<int R>(int64_t row) {
      int16_t a[R * kMostDims];
      float sums[R * kUnit];
      const Folded<R> folded = fold<R>(codes, q + row * q_stride, q_stride, dim, a);
      multiply<ops::CodedPages::kKeyLines, R>(codes, a, dim, sums);
      for (int r = 0; r < R; ++r) {
        for (int64_t t = 0; t < kUnit; t += 16) {
          fma(V::load(sums + r * kUnit + t), V::set(folded.scale[r]), V::set(folded.sum[r]))
              .store(scores + (row + r) * kUnit + t);
        }
      }
    });
    if (coded_.rest_bytes() == 0) return;
    const uint8_t* rest = keys_ + coded_.key_bytes() - coded_.rest_bytes();
    const CodedRest<Kv> lacking(coded_, rest, dim, kUnit);
    for_rows(rows, [&]<int R>(int64_t row) {
      lacking.template add<R>(q + row * q_stride, q_stride, scores + row * kUnit, kUnit);
    });
  }

  // out[row] = factors[row] out[row] + weights[row] . values, of weights of all 64 tokens.
  void add_values(const A* weights, int64_t stride, int64_t rows, const float* factors, float* out,
                  int64_t out_stride) const {
    const uint8_t* block = keys_ + coded_.key_bytes();
    for (int32_t first = 0; first < coded_.head_dim;) {
      const int32_t dims = coded_.block_dims(first);
      const Codes codes = codes_at(block, dims, kUnit);
      with_lines(dims, [&]<int N>() {
        for_rows(rows, [&]<int R>(int64_t row) {
          add_block<N, R>(codes, weights + row * stride, stride, factors + row,
                          out + row * out_stride + first, out_stride);
        });
      });
      block += coded_.block_bytes(dims);
      first += dims;
    }
    if (coded_.rest_bytes() == 0) return;
    const CodedRest<Kv> lacking(coded_, block, kUnit, coded_.head_dim);
    for_rows(rows, [&]<int R>(int64_t row) {
      lacking.template add<R>(weights + row * stride, stride, out + row * out_stride, out_stride);
    });
  }

 private:
  static constexpr int kMostDims = 256;

  struct Codes {
    const uint8_t* rows;
    int64_t num_rows;
    const F16* starts;  // along the inner dimension
    const F16* steps;
  };
  // Of each row: what one of its integers stands for, and its product with the starts.
  template <int R>
  struct Folded {
    float scale[R];
    float sum[R];
  };

  Codes codes_at(const uint8_t* from, int32_t dims, int64_t ranges) const {
    const size_t bytes = coded_.code_bytes(dims);
    const auto* starts = reinterpret_cast<const F16*>(from + bytes);
    for (int64_t i = 0; i < 4 * ranges; i += 64) {
      __builtin_prefetch(from + bytes + i + ahead_, 0, 2);
    }
    return {from, static_cast<int64_t>(bytes / ops::CodedPages::kRow), starts, starts + ranges};
  }

  // Calls f.operator()<R>(row) for groups of rows.
  template <class F>
  static void for_rows(int64_t rows, F&& f) {
    for (int64_t row = 0; row < rows; row += kMostCodeRows) {
      unroll<kMostCodeRows>([&](auto left) {
        constexpr int R = left + 1;
        if (rows - row == R || (R == kMostCodeRows && rows - row > R)) {
          f.template operator()<R>(row);
        }
      });
    }
  }
  template <class F>
  static void with_lines(int32_t dims, F&& f) {
    if (dims == 64) return f.template operator()<4>();
    if (dims == 32) return f.template operator()<2>();
    f.template operator()<1>();
  }

  // Numbers times steps as integers, and their product with the starts.
  template <int R>
  static Folded<R> fold(const Codes& codes, const A* numbers, int64_t stride, int64_t count,
                        int16_t* to) {
    float folded[R * kMostDims];
    V sums[R];
    V most[R];
    for (int r = 0; r < R; ++r) sums[r] = most[r] = V::set(0.0f);
    for (int64_t i = 0; i < count; i += 16) {
      const V start = V::load(codes.starts + i);
      const V step = V::load(codes.steps + i);
      for (int r = 0; r < R; ++r) {
        const V number = Math::load_factor(numbers + r * stride, i);
        const V x = number * step;
        sums[r] = fma(number, start, sums[r]);
        most[r] = max(most[r], abs(x));
        x.store(folded + r * count + i);
      }
    }
    Folded<R> result;
    for (int r = 0; r < R; ++r) {
      const float largest = maximum(most[r]);
      // Products below 2^-80 are as good as none, and their inverse might be infinite.
      const V inverse = V::set(largest > 0x1p-80f ? kMost / largest : 0.0f);
      result.scale[r] = largest * (1.0f / kMost);
      result.sum[r] = sum(sums[r]);
      for (int64_t i = 0; i < count; i += 16) {
        store_int16(V::load(folded + r * count + i) * inverse, to + r * count + i);
      }
    }
    return result;
  }

  template <int N, int R>
  void multiply(const Codes& codes, const int16_t* a, int64_t stride, float* sums) const {
    if (coded_.bits == 4) {
      multiply_codes<4, N, R>(a, stride, codes.rows, codes.num_rows, ahead_, sums);
    } else {
      multiply_codes<2, N, R>(a, stride, codes.rows, codes.num_rows, ahead_, sums);
    }
  }

  template <int N, int R>
  void add_block(const Codes& codes, const A* weights, int64_t stride, const float* factors,
                 float* out, int64_t out_stride) const {
    int16_t a[R * kUnit];
    float sums[R * 16 * N];
    const Folded<R> folded = fold<R>(codes, weights, stride, kUnit, a);
    multiply<N, R>(codes, a, kUnit, sums);
    for (int r = 0; r < R; ++r, out += out_stride) {
      for (int i = 0; i < 16 * N; i += 16) {
        const V before = fma(V::load(out + i), V::set(factors[r]), V::set(folded.sum[r]));
        fma(V::load(sums + r * 16 * N + i), V::set(folded.scale[r]), before).store(out + i);
      }
    }
  }

  static constexpr float kMost = 32767.0f;

  const ops::CodedPages& coded_;
  const uint8_t* keys_;
  int64_t ahead_;
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
