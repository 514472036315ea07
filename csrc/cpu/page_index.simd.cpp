// Bounds of pages and what logits they allow.
//
// The higher of x * least and x * most is max(x, 0) * most + min(x, 0) * least, so that a page's
// highest logit is two products of vectors.
#include "cpu/page_index.h"

#include "core/float16.h"
#include "cpu/level.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/kv.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// A line has P dimensions of 16 tokens; the lines of 16 tokens follow each other.
template <class Kv>
void bound_page(const PageKeys& page, uint16_t* out) {
  using V = typename Kv::V;
  constexpr int P = Kv::P;
  constexpr int64_t kLine = AttentionMath<Kv>::kLine;
  constexpr int kGroups = 4;  // of a page's 64 tokens
  const int64_t dim = page.head_dim;
  const V zero = V::set(0.0f);
  for (int64_t d = 0; d < dim; d += P) {
    V keys[kGroups][P];
    for (int group = 0; group < kGroups; ++group) {
      Kv::expand(page.k + (group * dim + d) / P * kLine, keys[group]);
      if constexpr (Kv::kScaled) {
        for (V& key : keys[group]) key = key * V::load(page.k_scale + group * 16);
      }
    }
    for (int j = 0; j < P; ++j) {
      const V least = min(min(keys[0][j], keys[1][j]), min(keys[2][j], keys[3][j]));
      const V most = max(max(keys[0][j], keys[1][j]), max(keys[2][j], keys[3][j]));
      out[d + j] = bf16_rounded(-maximum(zero - least), false);
      out[dim + d + j] = bf16_rounded(maximum(most), true);
    }
  }
}

using V = KvF32::V;

// The highest logits of N heads in a page.
template <int N>
void score_heads(const float* positive, const float* negative, int64_t dim, const uint16_t* bounds,
                 float* scores, int64_t stride) {
  const auto* least = reinterpret_cast<const Bf16*>(bounds);
  const Bf16* most = least + dim;
  V sums[N];
  for (int n = 0; n < N; ++n) sums[n] = V::set(0.0f);
  for (int64_t d = 0; d < dim; d += 16) {
    const V low = V::load(least + d);
    const V high = V::load(most + d);
    for (int n = 0; n < N; ++n) {
      sums[n] = fma(V::load(positive + n * dim + d), high, sums[n]);
      sums[n] = fma(V::load(negative + n * dim + d), low, sums[n]);
    }
  }
  for (int n = 0; n < N; ++n) scores[n * stride] = sum(sums[n]);
}

// The logarithm of the sum of exponentials.
float log_sum(const float* values, int64_t padded) {
  V highest = V::set(kNoScore);
  for (int64_t i = 0; i < padded; i += 16) highest = max(highest, V::load(values + i));
  const float most = maximum(highest);
  V sums = V::set(0.0f);
  for (int64_t i = 0; i < padded; i += 16) {
    sums = sums + simd::exp(V::load(values + i) - V::set(most));
  }
  return most + __builtin_logf(sum(sums));
}

// All heads' scores to those of the pages: the highest, each less its own sum's logarithm.
void join_heads(const PageScoreTile& tile, int64_t padded) {
  if (tile.group == 1) return;
  for (int64_t head = 0; head < tile.group; ++head) {
    const float* scores = tile.scores + head * padded;
    const V own = V::set(log_sum(scores, padded));
    for (int64_t i = 0; i < padded; i += 16) {
      const V x = V::load(scores + i) - own;
      (head == 0 ? x : max(V::load(tile.scores + i), x)).store(tile.scores + i);
    }
  }
}

void score_pages(const PageScoreTile& tile) {
  const int64_t dim = tile.head_dim;
  const int64_t size = tile.group * dim;
  const int64_t padded = padded_pages(tile.num_pages);
  float* const positive = tile.scratch;
  float* const negative = positive + size;
  const V zero = V::set(0.0f);
  for (int64_t d = 0; d < size; d += 16) {
    const V x = V::load(tile.q + d) * V::set(tile.sm_scale);
    max(x, zero).store(positive + d);
    min(x, zero).store(negative + d);
  }
  for (int64_t head = 0; head < tile.group; ++head) {
    for (int64_t i = tile.num_pages; i < padded; ++i) tile.scores[head * padded + i] = kNoScore;
  }
  for (int64_t page = 0; page < tile.num_pages; ++page) {
    const uint16_t* bounds = tile.bounds[page];
    const uint16_t* next = tile.bounds[page + 1 < tile.num_pages ? page + 1 : page];
    for (int64_t d = 0; d < 2 * dim; d += 32) __builtin_prefetch(next + d, 0, 3);
    int64_t head = 0;
    const auto take = [&]<int N>() {
      score_heads<N>(positive + head * dim, negative + head * dim, dim, bounds,
                     tile.scores + head * padded + page, padded);
      head += N;
    };
    while (tile.group - head >= 4) take.template operator()<4>();
    if (tile.group - head == 3) take.template operator()<3>();
    if (tile.group - head == 2) take.template operator()<2>();
    if (tile.group - head == 1) take.template operator()<1>();
  }
  join_heads(tile, padded);
}

void bound(const PageKeys& page, uint16_t* out) {
  switch (page.dtype) {
    case DType::f32:
      return bound_page<KvF32>(page, out);
    case DType::f16:
      return bound_page<KvF16>(page, out);
    case DType::bf16:
      return bound_page<KvBf16>(page, out);
    default:
      return bound_page<KvI8>(page, out);
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const PageIndexKernels& kernels<Level::EFFINFER_LEVEL>() {
  static constexpr PageIndexKernels kTable = {EFFINFER_LEVEL::bound, EFFINFER_LEVEL::score_pages};
  return kTable;
}

}  // namespace effinfer::cpu
