// Bounds of units of keys and what logits they allow, logits of single keys, and the highest of
// either.
//
// The higher of x * least and x * most is max(x, 0) * most + min(x, 0) * least, so that a unit's
// highest logit is two products of vectors.
#include "cpu/page_index.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/float16.h"
#include "cpu/level.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/kv.h"
#include "cpu/vectors/kv_lines.h"
#include "cpu/vectors/select.h"
#include "ops/top_list.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

using V = KvF32::V;

constexpr int64_t kLine = 64;
constexpr int64_t kGroups = ops::kPageSize / 16;  // of 16 tokens, whose lines follow each other
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// part<R>(head): heads [head, head + R) of the group.
template <class Part>
void for_heads(int64_t group, Part&& part) {
  int64_t head = 0;
  for (; group - head >= 4; head += 4) part.template operator()<4>(head);
  if (group - head == 3) part.template operator()<3>(head);
  if (group - head == 2) part.template operator()<2>(head);
  if (group - head == 1) part.template operator()<1>(head);
}

// The bounds of the keys of `groups` groups of a page. A line has P dimensions of 16 tokens.
template <class Kv>
void bound_unit(const PageKeys& page, int64_t dim, int64_t first, int64_t groups, uint16_t* out) {
  constexpr int P = Kv::P;
  for (int64_t d = 0; d < dim; d += P) {
    V least[P], most[P];
    for (int j = 0; j < P; ++j) {
      least[j] = V::set(kInfinity);
      most[j] = V::set(-kInfinity);
    }
    for (int64_t group = first; group < first + groups; ++group) {
      V keys[P];
      Kv::expand(page.k + (group * dim + d) / P * kLine, keys);
      for (int j = 0; j < P; ++j) {
        if constexpr (Kv::kScaled) keys[j] = keys[j] * V::load(page.k_scale + group * 16);
        least[j] = min(least[j], keys[j]);
        most[j] = max(most[j], keys[j]);
      }
    }
    for (int j = 0; j < P; ++j) {
      out[d + j] = bf16_rounded(-maximum(V::set(0.0f) - least[j]), false);
      out[dim + d + j] = bf16_rounded(maximum(most[j]), true);
    }
  }
}

template <class Kv>
void bound_page(const KeyShape& shape, const PageKeys& page, int64_t unit, uint16_t* out) {
  const int64_t groups = unit / 16;
  for (int64_t first = 0; first < kGroups; first += groups) {
    bound_unit<Kv>(page, shape.head_dim, first, groups, out + first / groups * 2 * shape.head_dim);
  }
}

// The means of 16 keys each.
template <class Kv>
void average_page(const KeyShape& shape, const PageKeys& page, uint16_t* out) {
  constexpr int P = Kv::P;
  const int64_t dim = shape.head_dim;
  for (int64_t group = 0; group < kGroups; ++group) {
    for (int64_t d = 0; d < dim; d += P) {
      V keys[P];
      Kv::expand(page.k + (group * dim + d) / P * kLine, keys);
      for (int j = 0; j < P; ++j) {
        if constexpr (Kv::kScaled) keys[j] = keys[j] * V::load(page.k_scale + group * 16);
        out[group * dim + d + j] = f32_to_bf16(sum(keys[j]) / 16.0f);
      }
    }
  }
}

// The highest logits of R heads in a unit.
template <int R>
void bound_logits(const float* positive, const float* negative, int64_t dim, const uint16_t* bounds,
                  float* scores, int64_t stride) {
  const auto* least = reinterpret_cast<const Bf16*>(bounds);
  const Bf16* most = least + dim;
  V sums[R];
  for (int r = 0; r < R; ++r) sums[r] = V::set(0.0f);
  for (int64_t d = 0; d < dim; d += 16) {
    const V low = V::load(least + d);
    const V high = V::load(most + d);
    for (int r = 0; r < R; ++r) {
      sums[r] = fma(V::load(positive + r * dim + d), high, sums[r]);
      sums[r] = fma(V::load(negative + r * dim + d), low, sums[r]);
    }
  }
  for (int r = 0; r < R; ++r) scores[r * stride] = sum(sums[r]);
}

// The logits of R heads with a unit's mean.
template <int R>
void mean_logits(const float* q, int64_t dim, const uint16_t* mean, float* scores, int64_t stride) {
  V sums[R];
  for (int r = 0; r < R; ++r) sums[r] = V::set(0.0f);
  for (int64_t d = 0; d < dim; d += 16) {
    const V key = V::load(reinterpret_cast<const Bf16*>(mean) + d);
    for (int r = 0; r < R; ++r) sums[r] = fma(V::load(q + r * dim + d), key, sums[r]);
  }
  for (int r = 0; r < R; ++r) scores[r * stride] = sum(sums[r]);
}

// score<R>(head, unit, numbers, scores, stride) for the heads [head, head + R) of each unit, which
// has `size` numbers; behind the units there are no scores.
template <class Score>
void for_units(const UnitScoreTile& tile, int64_t size, Score&& score) {
  const int64_t group = tile.queries.group;
  const int64_t padded = padded_scores(tile.num_units);
  for (int64_t head = 0; head < group; ++head) {
    for (int64_t i = tile.num_units; i < padded; ++i) tile.scores[head * padded + i] = kNoScore;
  }
  for (int64_t unit = 0; unit < tile.num_units; ++unit) {
    const uint16_t* next = tile.bounds[std::min(unit + 1, tile.num_units - 1)];
    for (int64_t i = 0; i < size; i += 32) __builtin_prefetch(next + i, 0, 3);
    for_heads(group, [&]<int R>(int64_t head) {
      score.template operator()<R>(head, tile.bounds[unit], tile.scores + head * padded + unit,
                                   padded);
    });
  }
}

void score_units(const UnitScoreTile& tile) {
  const auto& [q, group, head_dim, sm_scale] = tile.queries;
  const int64_t dim = head_dim;
  float* const positive = tile.scratch;
  float* const negative = positive + group * dim;
  const V zero = V::set(0.0f);
  for (int64_t d = 0; d < group * dim; d += 16) {
    const V x = V::load(q + d) * V::set(sm_scale);
    max(x, zero).store(positive + d);
    min(x, zero).store(negative + d);
  }
  for_units(tile, 2 * dim,
            [&]<int R>(int64_t head, const uint16_t* bounds, float* scores, int64_t stride) {
              bound_logits<R>(positive + head * dim, negative + head * dim, dim, bounds, scores,
                              stride);
            });
}

void score_means_times(const UnitScoreTile& tile, float scale) {
  const float* const q = tile.queries.q;
  const int64_t group = tile.queries.group;
  const int64_t dim = tile.queries.head_dim;
  float* const scaled = tile.scratch;
  for (int64_t d = 0; d < group * dim; d += 16) {
    (V::load(q + d) * V::set(scale)).store(scaled + d);
  }
  for_units(tile, dim,
            [&]<int R>(int64_t head, const uint16_t* mean, float* scores, int64_t stride) {
              mean_logits<R>(scaled + head * dim, dim, mean, scores, stride);
            });
}

void score_means(const UnitScoreTile& tile) {
  score_means_times(tile, tile.queries.sm_scale);
}

// A window's mean is half of either unit's.
void score_windows(const UnitScoreTile& tile) {
  score_means_times(tile, 0.5f * tile.queries.sm_scale);
  const int64_t group = tile.queries.group;
  const int64_t padded = padded_scores(tile.num_units);
  for (int64_t head = 0; head < group; ++head) {
    float* const scores = tile.scores + head * padded;
    for (int64_t i = 0; i + 1 < tile.num_units; ++i) scores[i] += scores[i + 1];
    scores[tile.num_units - 1] = kNoScore;
  }
}

// Queries with their scale, zero in channels that do not count, and the lines of a group of tokens
// that have some that do.
struct ChannelQueries {
  const float* q;  // [group][dim]
  const int32_t* lines;
  int64_t num_lines;
};

template <class Kv>
ChannelQueries channel_queries(const KeyScoreTile& tile) {
  const auto& [q, group, head_dim, sm_scale] = tile.queries;
  const int64_t dim = head_dim;
  float* const scaled = tile.scratch;
  auto* const lines = reinterpret_cast<int32_t*>(scaled + group * dim);
  if (tile.num_channels == 0) {
    const V scale = V::set(sm_scale);
    for (int64_t d = 0; d < group * dim; d += 16) (V::load(q + d) * scale).store(scaled + d);
    for (int64_t i = 0; i < dim / Kv::P; ++i) lines[i] = static_cast<int32_t>(i);
    return {scaled, lines, dim / Kv::P};
  }
  std::fill_n(scaled, group * dim, 0.0f);
  int64_t count = 0;
  for (int32_t i = 0; i < tile.num_channels; ++i) {
    const int32_t channel = tile.channels[i];
    for (int64_t row = 0; row < group * dim; row += dim) {
      scaled[row + channel] = q[row + channel] * sm_scale;
    }
    const int32_t line = channel / Kv::P;
    if (count == 0 || lines[count - 1] != line) lines[count++] = line;
  }
  return {scaled, lines, count};
}

// The logits of R heads with a page's keys. `next` are those of the page that comes next.
template <class Kv, int R>
void key_logits(const ChannelQueries& queries, int64_t dim, const PageKeys& page,
                const uint8_t* next, float* scores, int64_t stride) {
  constexpr int P = Kv::P;
  constexpr int N = Kv::wide(R);
  const int64_t group_bytes = dim / P * kLine;
  for (int64_t group = 0; group < kGroups; group += N) {
    V sums[R][N];
    for (auto& row : sums) {
      for (V& each : row) each = V::set(0.0f);
    }
    for (int64_t i = 0; i < queries.num_lines; ++i) {
      const int64_t line = queries.lines[i];
      V keys[N][P];
      for (int n = 0; n < N; ++n) {
        const int64_t at = (group + n) * group_bytes + line * kLine;
        __builtin_prefetch(next + at, 0, 2);
        Kv::expand(page.k + at, keys[n]);
      }
      for (int j = 0; j < P; ++j) {
        for (int r = 0; r < R; ++r) {
          const V x = V::set(queries.q[r * dim + line * P + j]);
          for (int n = 0; n < N; ++n) sums[r][n] = fma(x, keys[n][j], sums[r][n]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) {
        if constexpr (Kv::kScaled) {
          sums[r][n] = sums[r][n] * V::load(page.k_scale + (group + n) * 16);
        }
        sums[r][n].store(scores + r * stride + (group + n) * 16);
      }
    }
  }
}

template <class Kv>
void score_pages(const KeyScoreTile& tile) {
  const ChannelQueries queries = channel_queries<Kv>(tile);
  const int64_t dim = tile.queries.head_dim;
  const int64_t stride = tile.num_pages * ops::kPageSize;
  for (int64_t page = 0; page < tile.num_pages; ++page) {
    const uint8_t* next = tile.pages[std::min(page + 1, tile.num_pages - 1)].k;
    for_heads(tile.queries.group, [&]<int R>(int64_t head) {
      const ChannelQueries own = {queries.q + head * dim, queries.lines, queries.num_lines};
      key_logits<Kv, R>(own, dim, tile.pages[page], next,
                        tile.scores + head * stride + page * ops::kPageSize, stride);
    });
  }
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

void vote(float* scores, int64_t count, int64_t group, bool adds) {
  if (group == 1) return;
  const int64_t padded = padded_scores(count);
  for (int64_t head = 0; head < group; ++head) {
    const float* own = scores + head * padded;
    const V all = V::set(log_sum(own, padded));
    for (int64_t i = 0; i < padded; i += 16) {
      V x = V::load(own + i) - all;
      if (adds) x = simd::exp(x);
      if (head > 0) x = adds ? V::load(scores + i) + x : max(V::load(scores + i), x);
      x.store(scores + i);
    }
  }
}

int64_t count_from(const float* values, int64_t padded, float least) {
  const V wanted = V::set(least);
  int64_t count = 0;
  for (int64_t i = 0; i < padded; i += 16) {
    count += __builtin_popcount(bits_from(V::load(values + i), wanted));
  }
  return count;
}

// What ops::order_key() is of.
float float_of(int64_t key) {
  const auto bits = static_cast<int32_t>(key);
  return std::bit_cast<float>(bits ^ (bits >> 31 & 0x7fffffff));
}

// Of at least `kept` values the one that as many are from on, by bisection over all floats. What
// pads the values is below them, so that it is never counted alone.
float least_kept(const float* values, int64_t padded, int64_t kept) {
  V least = V::set(kInfinity), most = V::set(-kInfinity);
  for (int64_t i = 0; i < padded; i += 16) {
    least = min(V::load(values + i), least);  // a NaN is left out
    most = max(V::load(values + i), most);
  }
  int64_t low = ops::order_key(-maximum(V::set(0.0f) - least));
  int64_t high = int64_t{ops::order_key(maximum(most))} + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t count = count_from(values, padded, float_of(middle));
    (count >= kept ? low : high) = middle;
    if (count == kept) break;
  }
  return float_of(low);
}

void choose(const float* scores, int64_t count, int64_t kept, uint64_t* bits) {
  const int64_t padded = padded_scores(count);
  const V least = V::set(least_kept(scores, padded, kept));
  int64_t ties = kept;
  for (int64_t i = 0; i < padded; i += 16) {
    ties -= __builtin_popcount(bits_above(V::load(scores + i), least));
  }
  for (int64_t i = 0; i < padded; i += 16) {
    const V x = V::load(scores + i);
    uint32_t chosen = bits_above(x, least);
    for (uint32_t equal = bits_from(x, least) & ~chosen; equal != 0 && ties > 0; --ties) {
      chosen |= equal & -equal;
      equal &= equal - 1;
    }
    bits[i / 64] |= uint64_t{chosen} << i % 64;
  }
}

void bound(const KeyShape& shape, const PageKeys& page, int64_t unit, uint16_t* out) {
  with_lines(shape.dtype, [&]<class Kv>() { bound_page<Kv>(shape, page, unit, out); });
}

void average(const KeyShape& shape, const PageKeys& page, uint16_t* out) {
  with_lines(shape.dtype, [&]<class Kv>() { average_page<Kv>(shape, page, out); });
}

void score_keys(const KeyScoreTile& tile) {
  with_lines(tile.dtype, [&]<class Kv>() { score_pages<Kv>(tile); });
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const PageIndexKernels& kernels<Level::EFFINFER_LEVEL>() {
  namespace level = EFFINFER_LEVEL;
  static constexpr PageIndexKernels kTable = {
      level::bound,         level::average,    level::score_units, level::score_means,
      level::score_windows, level::score_keys, level::vote,        level::choose};
  return kTable;
}

}  // namespace effinfer::cpu
