// What the codes of a page lack (ops/coded_pages.h), in the products of attention with it: of keys
// columns are tokens and the inner dimension is the head's, of values the other way round.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/unroll.h"
#include "ops/coded_pages.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
class CodedRest {
 public:
  using Math = AttentionMath<Kv>;
  using A = typename Math::A;
  using V = typename Kv::V;

  CodedRest(const ops::CodedPages& coded, const uint8_t* from, int64_t inner, int64_t columns)
      : coded_(coded),
        factors_(reinterpret_cast<const Bf16*>(from)),
        inner_(inner),
        columns_(columns) {}

  // results[R][columns] += a[R][inner] . rest. Outliers of a column follow each other often, so
  // that a row would wait for its own last sum; several rows do not wait for each other.
  template <int R>
  void add(const A* a, int64_t a_stride, float* results, int64_t stride) const {
    for (int r = 0; r < R; ++r) add_factors(a + r * a_stride, results + r * stride);
    const auto* places =
        reinterpret_cast<const uint16_t*>(factors_ + coded_.rank * (inner_ + columns_));
    const auto* missing = places + coded_.outliers;
    for (int32_t i = 0; i < coded_.outliers; ++i) {
      const float lacks = bf16_to_f32(missing[i]);
      const int inner = places[i] >> 8;
      float* result = results + (places[i] & 255);
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        result[r * stride] += Math::factor(a + r * a_stride, inner) * lacks;
      });
    }
  }

 private:
  void add_factors(const A* a, float* results) const {
    const Bf16* factor = factors_;
    for (int32_t i = 0; i < coded_.rank; ++i, factor += inner_ + columns_) {
      V sums = V::set(0.0f);
      for (int64_t d = 0; d < inner_; d += 16) {
        sums = fma(Math::load_factor(a, d), V::load(factor + d), sums);
      }
      const V weight = V::set(sum(sums));
      for (int64_t c = 0; c < columns_; c += 16) {
        fma(weight, V::load(factor + inner_ + c), V::load(results + c)).store(results + c);
      }
    }
  }

  const ops::CodedPages& coded_;
  const Bf16* factors_;
  int64_t inner_;
  int64_t columns_;
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
