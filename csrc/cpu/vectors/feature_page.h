// A page of features (ops/page_features.h) as attention of one KV head reads it. Its keys are
// expanded into a page of the head's own, which is then multiplied as any; of its values features
// are weighed, and the sums expanded, a row at a time.
#pragma once

#include <cstdint>

#include "cpu/vectors/coded_page.h"
#include "cpu/vectors/expanded_page.h"
#include "cpu/vectors/kv.h"
#include "cpu/vectors/page_turn.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
class FeaturePage {
 public:
  using Math = AttentionMath<Kv>;
  using A = typename Math::A;
  using V = typename Kv::V;

  FeaturePage(const ops::CodedPages& coded, int32_t page, int64_t head)
      : coded_(coded), features_(*coded.features), page_(page), head_(head) {}

  // To a page of bfloat16, or of float32 (ops/kv_layout.h).
  [[gnu::noinline]] void expand_keys(uint32_t* to) const {
    if constexpr (Kv::P <= 2) {
      alignas(64) float keys[kMostDims * kUnit];
      alignas(64) float more[kMostDims * kUnit];
      const int64_t dim = features_.head_dim;
      for (int64_t part = 0; part < coded_.num_kv_heads; ++part) {
        const ops::CodedPages own = part_at(part);
        const float* rows = features_.key_dims + head_ * dim * features_.count;
        float* scores = part == 0 ? keys : more;
        CodedPage<KvF32>(own, page_, 0)
            .score(rows + part * own.head_dim, features_.count, dim, scores);
        for (int64_t i = 0; part > 0 && i < dim * kUnit; i += 16) {
          (V::load(keys + i) + V::load(more + i)).store(keys + i);
        }
      }
      turn_keys<V, false>(features_.turns, *coded_.place(page_, 0), keys);
      store_keys<Kv>(keys, dim, to);
    }
  }

  // out[row] = factors[row] out[row] + weights[row] . values, of weights of all 64 tokens.
  void add_values(const A* weights, int64_t stride, int64_t rows, const float* factors, float* out,
                  int64_t out_stride) const {
    for (int64_t row = 0; row < rows; row += kMostCodeRows) {
      const int64_t count = rows - row < kMostCodeRows ? rows - row : kMostCodeRows;
      for (int64_t r = row; r < row + count; ++r) {
        for (int64_t d = 0; d < features_.head_dim; d += 16) {
          float* to = out + r * out_stride + d;
          (V::load(to) * V::set(factors[r])).store(to);
        }
      }
      for (int64_t part = 0; part < coded_.num_kv_heads; ++part) {
        const ops::CodedPages own = part_at(part);
        alignas(64) float sums[kMostCodeRows * kMostDims] = {};
        constexpr float kNothing[kMostCodeRows] = {};
        CodedPage<Kv>(own, page_, 0)
            .add_values(weights + row * stride, stride, count, kNothing, sums, own.head_dim);
        for (int64_t r = 0; r < count; ++r) {
          expand(sums + r * own.head_dim, part * own.head_dim, own.head_dim,
                 out + (row + r) * out_stride);
        }
      }
    }
  }

 private:
  static constexpr int kMostDims = 256;
  static_assert(ops::PageFeatures::kMostPart == kMostDims);

  // Of one head, which is a part.
  ops::CodedPages part_at(int64_t part) const {
    ops::CodedPages own = coded_;
    own.data += static_cast<size_t>(part) * coded_.head_bytes();
    return own;
  }

  // Adds what these features, from `first` on, stand for in the head's values.
  void expand(const float* sums, int64_t first, int64_t count, float* out) const {
    constexpr int kWide = 4;
    const int64_t dim = features_.head_dim;
    const float* rows = features_.values + first * features_.dims() + head_ * dim;
    for (int64_t d = 0; d < dim;) {
      const int64_t vectors = (dim - d) / 16 < kWide ? (dim - d) / 16 : kWide;
      V totals[kWide];
      for (int64_t i = 0; i < vectors; ++i) totals[i] = V::load(out + d + 16 * i);
      for (int64_t f = 0; f < count; ++f) {
        const V x = V::set(sums[f]);
        const float* row = rows + f * features_.dims() + d;
        for (int64_t i = 0; i < vectors; ++i) totals[i] = fma(x, V::load(row + 16 * i), totals[i]);
      }
      for (int64_t i = 0; i < vectors; ++i) totals[i].store(out + d + 16 * i);
      d += 16 * vectors;
    }
  }

  const ops::CodedPages& coded_;
  const ops::PageFeatures& features_;
  int32_t page_;
  int64_t head_;
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
