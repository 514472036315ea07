// Coded pages that attention expands to keys and values before it multiplies them: rows of it in
// double precision, over what these are.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "coded_model.h"
#include "effinfer/kv_cache.h"

namespace effinfer::coded {

inline constexpr double kHalfUnit = 0x1p-16 * 1.001;  // of a 16-bit integer, by the greatest
inline constexpr double kFloat = 0x1p-24;

// Of pairs of a key's dimensions by its position.
struct Turn {
  int32_t pairs = 0;
  bool interleaved = false;

  float frequency(int32_t pair) const { return std::pow(0.3f, static_cast<float>(pair)); }
  int32_t first(int32_t pair) const { return interleaved ? 2 * pair : pair; }
  int32_t second(int32_t pair) const { return interleaved ? 2 * pair + 1 : pair + pairs; }

  KvRope rope() const {
    KvRope rope;
    rope.interleaved = interleaved;
    for (int32_t i = 0; i < pairs; ++i) rope.inv_freq.push_back(frequency(i));
    return rope;
  }
  // Forward, or back with a sign of -1.
  void apply(int64_t position, double sign, double* key) const {
    for (int32_t i = 0; i < pairs; ++i) {
      double& x = key[first(i)];
      double& y = key[second(i)];
      const double angle = sign * double{frequency(i)} * static_cast<double>(position);
      const double turned = x * std::cos(angle) - y * std::sin(angle);
      y = x * std::sin(angle) + y * std::cos(angle);
      x = turned;
    }
  }
};

// What rows read of a page in double precision, and by how much what is got may differ.
struct Expanded {
  struct Number {
    double value;
    double off;  // of keys; of values the magnitudes that they are sums of
  };
  std::vector<Number> keys, values;  // [page][token][head * dim]
};

// A key that is turned to its position: both have at most the errors of their pair, what float32
// rounds, and what bfloat16 does where pages are of it.
inline void turn_key(const Turn& turn, int64_t position, bool narrow, int64_t dim,
                     Expanded::Number* key) {
  std::vector<double> turned;
  for (int64_t d = 0; d < dim; ++d) turned.push_back(key[d].value);
  turn.apply(position, 1.0, turned.data());
  for (int32_t i = 0; i < turn.pairs; ++i) {
    Expanded::Number& x = key[turn.first(i)];
    Expanded::Number& y = key[turn.second(i)];
    x.off = y.off = x.off + y.off + 8 * kFloat * (std::abs(x.value) + std::abs(y.value));
  }
  for (int64_t d = 0; d < dim; ++d) {
    key[d].value = turned[static_cast<size_t>(d)];
    if (narrow) key[d].off += 0x1p-9 * std::abs(key[d].value);
  }
}

// A row of a sequence beside double precision: the greatest error by what it may be.
inline double worst_of_row(const BothKinds& pages, const Expanded& coded, const Batch& batch,
                           const Call& call, size_t s, int32_t row, const float* got) {
  const KvLayer& kv = pages.layer;
  const int64_t dims = int64_t{kv.num_kv_heads} * kv.head_dim;
  const auto index = [](int64_t i) { return static_cast<size_t>(i); };
  const bool narrow = call.problem.arithmetic == Arithmetic::bf16;
  const double rounding = (narrow ? 0x1p-8 : 0.0) + 64 * kFloat;
  const int64_t end = batch.kv_len[s] - (batch.qo_indptr[s + 1] - row) + 1;
  const int64_t group = call.problem.num_qo_heads / kv.num_kv_heads;
  const auto number = [&](int64_t t, int64_t head, int64_t d, bool key) {
    const int32_t page = batch.kv_indices[index(batch.kv_indptr[s] + t / kPageSize)];
    if (page >= kv.num_pages) {
      const int64_t token = (page - kv.num_pages) * kPageSize + t % kPageSize;
      return (key ? coded.keys : coded.values)[index(token * dims + head * kv.head_dim + d)];
    }
    const double x =
        key ? pages.key(page, head, t % kPageSize, d) : pages.value(page, head, t % kPageSize, d);
    return Expanded::Number{x, key ? 0.0 : std::abs(x)};
  };
  double worst = 0;
  for (int64_t q_head = 0; q_head < call.problem.num_qo_heads; ++q_head) {
    const int64_t head = q_head / group;
    const float* q = &call.q[index(row * call.problem.out_stride + q_head * kv.head_dim)];
    std::vector<double> weights;
    double off = 0;
    for (int64_t t = 0; t < end; ++t) {
      double logit = 0, error = 0;
      for (int64_t d = 0; d < kv.head_dim; ++d) {
        const Expanded::Number key = number(t, head, d, true);
        logit += q[d] * key.value;
        error += std::abs(q[d]) * (key.off + std::abs(key.value) * rounding);
      }
      weights.push_back(logit * call.problem.sm_scale);
      off = std::max(off, error * call.problem.sm_scale);
    }
    const double highest = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (double& weight : weights) total += weight = std::exp(weight - highest);
    const double weights_off = std::expm1(2 * off) + rounding;
    for (int64_t d = 0; d < kv.head_dim; ++d) {
      double value = 0, bound = 1e-6;
      for (int64_t t = 0; t < end; ++t) {
        const Expanded::Number own = number(t, head, d, false);
        const double weight = weights[index(t)] / total;
        value += weight * own.value;
        // Weights times steps are 16-bit integers of the greatest of a page: of each of 64 tokens
        // half of one.
        bound += weight * (std::abs(own.value) * weights_off + own.off * kPageSize * kHalfUnit);
      }
      worst = std::max(worst, std::abs(got[q_head * kv.head_dim + d] - value) / bound);
    }
  }
  return worst;
}

}  // namespace effinfer::coded
