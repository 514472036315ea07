// Naive attention in float64 of the batches of attention_batch.h, and how far from it results may
// be.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "gpu/attention_batch.h"

namespace effinfer {

// A row of a part: its own path's tokens, and of these those that it sees, by places.
struct Row {
  std::vector<int32_t> tokens;
  std::vector<int32_t> seen;
  int32_t position;
};

inline Row row_of(const Batch& batch, const Rules& rules, const Part& part, int32_t i, int64_t head,
                  int32_t kv_heads) {
  Row row;
  row.position = part.length - part.rows + i;
  const bool is_tree = !part.paths.empty();
  const int32_t begin = part.tree_start >= 0 ? part.tree_start : part.length - part.rows;
  for (int32_t token = 0; token < part.length; ++token) {
    const bool own = !is_tree || token < begin ||
                     (part.paths[static_cast<size_t>(i)] >> (token - begin) & 1) != 0;
    if (own) row.tokens.push_back(token);
  }
  if (is_tree) row.position = static_cast<int32_t>(row.tokens.size()) - 1;
  const std::vector<uint64_t>* words = nullptr;
  if (!part.words.empty()) words = &part.words[static_cast<size_t>(i / 64 * kv_heads + head)];
  for (int32_t place = 0; place < static_cast<int32_t>(row.tokens.size()); ++place) {
    if ((rules.causal || is_tree) && place > row.position) break;
    const bool near = rules.window_left < 0 || place >= row.position - rules.window_left ||
                      place < rules.sink_tokens;
    const bool visited =
        words == nullptr || ((*words)[static_cast<size_t>(place / 64)] >> place % 64 & 1) != 0;
    if (near && visited) row.seen.push_back(place);
  }
  (void)batch;
  return row;
}

struct Expected {
  std::vector<double> out;
  std::vector<double> magnitude;  // of what was summed
  double lse;
  double score_error;
};

// In chunks of keys.
inline int distance_of(const Rules& rules, const Part& part, int32_t row, int32_t key) {
  if (rules.chunk == 0 || part.unchunked) return 0;
  return std::min(row / rules.chunk - key / rules.chunk, 2);
}

// A row's queries of one head as they are for keys at a distance.
inline std::vector<double> queries_at(int distance, const Sequence& s, const Heads& heads,
                                      int32_t token, int64_t head) {
  std::vector<double> q(static_cast<size_t>(heads.dims));
  for (int64_t d = 0; d < heads.dims; ++d) {
    const int64_t dim = query_dim(distance, d, heads.dims);
    q[static_cast<size_t>(d)] =
        double{s.q[index_of(token, head, dim, heads.qo_heads(), heads.dims)]} *
        query_factor(distance);
  }
  return q;
}

// Naive attention of one row and head, and how far float32 sums of its scores may be off.
inline Expected attend(const Cache& cache, const Rules& rules, const Part& part, const Row& row,
                       int32_t query_row, int64_t head) {
  const Heads& heads = cache.heads();
  const Sequence& s = cache.sequence(part.sequence);
  const int64_t kv_head = head / heads.group;
  const double scale = 1.0f / std::sqrt(static_cast<float>(heads.dims));
  Expected e = {std::vector<double>(static_cast<size_t>(heads.dims)),
                std::vector<double>(static_cast<size_t>(heads.dims)), -INFINITY, 0.0};
  std::array<std::vector<double>, 3> queries;
  for (int distance = 0; distance < (rules.chunk == 0 ? 1 : 3); ++distance) {
    queries[static_cast<size_t>(distance)] =
        queries_at(distance, s, heads, part.length - part.rows + query_row, head);
  }
  std::vector<double> x;
  double max = -INFINITY;
  for (const int32_t place : row.seen) {
    const int32_t token = row.tokens[static_cast<size_t>(place)];
    const size_t scales = static_cast<size_t>(int64_t{token} * heads.kv_heads + kv_head);
    const int distance = distance_of(rules, part, part.length - part.rows + query_row, token);
    const double* const q = queries[static_cast<size_t>(distance)].data();
    const float* const k = &s.k[index_of(token, kv_head, 0, heads.kv_heads, heads.dims)];
    // Four sums, of which none waits for another.
    std::array<double, 4> dots{};
    std::array<double, 4> sizes{};
    for (int64_t d = 0; d < heads.dims; d += 4) {
      for (size_t i = 0; i < 4; ++i) {
        const double product = q[d + static_cast<int64_t>(i)] * k[d + static_cast<int64_t>(i)];
        dots[i] += product;
        sizes[i] += std::abs(product);
      }
    }
    const double key_scale = s.k_scale[scales];
    const double dot = (dots[0] + dots[1] + dots[2] + dots[3]) * key_scale;
    const double size = (sizes[0] + sizes[1] + sizes[2] + sizes[3]) * key_scale;
    double logit = dot * scale;
    if (rules.soft_cap > 0) logit = rules.soft_cap * std::tanh(logit / rules.soft_cap);
    if (!rules.slopes.empty()) {
      logit += rules.slopes[static_cast<size_t>(head)] * double(place - row.position);
    }
    if (!part.log_weights.empty()) {
      const auto list = static_cast<size_t>(query_row / 64 * heads.kv_heads + kv_head);
      logit += double{part.log_weights[list][static_cast<size_t>(place)]};
    }
    if (!part.plane.empty()) {
      const size_t slots = part.plane.size() / static_cast<size_t>(heads.kv_heads);
      logit +=
          double{part.plane[static_cast<size_t>(kv_head) * slots + static_cast<size_t>(token)]};
      if (token == 0 && !rules.first_logits.empty()) {
        logit += double{rules.first_logits[static_cast<size_t>(head)]};
      }
    }
    x.push_back(logit);
    max = std::max(max, logit);
    e.score_error = std::max(e.score_error, size * scale * heads.dims * 0x1p-24 +
                                                (std::abs(logit) + rules.soft_cap) * 0x1p-21);
  }
  double sum = 0;
  if (!rules.sinks.empty()) {
    const double sink = rules.sinks[static_cast<size_t>(head)];
    max = std::max(max, sink);
    sum = std::exp(sink - max);
  }
  for (double& logit : x) sum += logit = std::exp(logit - max);
  if (sum == 0) return e;
  e.lse = max + std::log(sum);
  for (size_t i = 0; i < x.size(); ++i) {
    const int32_t token = row.tokens[static_cast<size_t>(row.seen[i])];
    const size_t scales = static_cast<size_t>(int64_t{token} * heads.kv_heads + kv_head);
    const float* const v = &s.v[index_of(token, kv_head, 0, heads.kv_heads, heads.dims)];
    const double weight = s.v_scale[scales] * x[i] / sum;
    for (size_t d = 0; d < e.out.size(); ++d) {
      const double value = v[d] * weight;
      e.out[d] += value;
      e.magnitude[d] += std::abs(value);
    }
  }
  return e;
}

// Of rounding to nearest.
inline double epsilon_of(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}

// `score_error`: beside that of sums, as of queries that are rounded.
inline void check_batch(const Cache& cache, const Rules& rules, const Batch& batch,
                        const Results& results, DType out_dtype, double score_error = 0.0) {
  const Heads& heads = cache.heads();
  const DType weights = heads.kv == DType::i8 ? DType::bf16 : heads.kv;
  size_t flat = 0;
  int failures = 0;
  for (const Part& part : batch.parts()) {
    for (int32_t i = 0; i < part.rows; ++i) {
      for (int32_t head = 0; head < heads.qo_heads(); ++head, ++flat) {
        const Row row = row_of(batch, rules, part, i, head / heads.group, heads.kv_heads);
        const Expected e = attend(cache, rules, part, row, i, head);
        const double scores = e.score_error + score_error;
        for (size_t d = 0; d < e.out.size(); ++d) {
          // Rounding of weights, of scores that they are made of, and of sums of a few hundred.
          const double bound = e.magnitude[d] * (epsilon_of(weights) + 2 * scores + 0x1p-15) +
                               std::abs(e.out[d]) * epsilon_of(out_dtype) + 1e-30;
          const double got = results.out[flat * e.out.size() + d];
          if (!(std::abs(got - e.out[d]) <= bound) && failures++ < 5) {
            std::printf("row %d of %d, head %d, dim %zu: %g, expected %g +- %g\n", i, part.rows,
                        head, d, got, e.out[d], bound);
          }
        }
        const double lse = results.lse[flat];
        const bool near =
            e.lse == lse || std::abs(lse - e.lse) <= scores + 0x1p-18 * (1 + std::abs(e.lse));
        if (!near && failures++ < 5) std::printf("lse %g, expected %g\n", lse, e.lse);
      }
    }
  }
  CHECK_EQ(failures, 0);
}

// Attends to keys that are all alike with logits of up to `size`: rows are the value, whatever the
// logits are.
inline void check_large_logits(const Heads& heads, const Launch& how, double size) {
  Cache cache(heads, 91);
  const int index = cache.add_constant(600);
  cache.upload();
  const Sequence& s = cache.sequence(index);
  std::vector<double> logits(static_cast<size_t>(heads.qo_heads()));
  double largest = 0.0;
  for (size_t head = 0; head < logits.size(); ++head) {
    const size_t kv_head = head / static_cast<size_t>(heads.group);
    const auto dims = static_cast<size_t>(heads.dims);
    for (size_t d = 0; d < dims; ++d) {
      logits[head] += double{s.q[head * dims + d]} * s.k[kv_head * dims + d] * s.k_scale[kv_head] /
                      std::sqrt(heads.dims);
    }
    largest = std::max(largest, std::abs(logits[head]));
  }
  const double scale = std::exp2(std::floor(std::log2(size / largest)));
  Batch batch(cache, {}, {{index, 600, 3}});
  batch.scale_queries(static_cast<float>(scale));
  const Results results = batch.run(how);
  int failures = 0;
  for (size_t row = 0; row < results.lse.size(); ++row) {
    const size_t head = row % logits.size();
    const size_t kv_head = head / static_cast<size_t>(heads.group);
    const double logit = logits[head] * scale;
    failures += std::abs(results.lse[row] - logit) <= 0x1p-20 * std::abs(logit) + 10.0 ? 0 : 1;
    for (size_t d = 0; d < static_cast<size_t>(heads.dims); ++d) {
      const double value =
          double{s.v[kv_head * static_cast<size_t>(heads.dims) + d]} * s.v_scale[kv_head];
      const double got = results.out[row * static_cast<size_t>(heads.dims) + d];
      // Roundings of weights and of the result.
      failures += std::abs(got - value) <= 0x1p-7 * std::abs(value) + 1e-6 ? 0 : 1;
    }
  }
  CHECK_EQ(failures, 0);
}

inline bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Of results that should be the same: how many numbers are not, and what the first two are.
inline std::string difference(const std::vector<float>& a, const std::vector<float>& b) {
  size_t count = 0;
  size_t first = a.size();
  double largest = 0;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) == 0) continue;
    if (count++ == 0) first = i;
    largest = std::max(largest, std::abs(double{a[i]} - b[i]));
  }
  std::ostringstream text;
  text << count << " of " << a.size() << " numbers differ";
  if (count > 0) {
    text << ", the first at " << first << ": " << a[first] << " and " << b[first] << "; at most by "
         << largest;
  }
  return text.str();
}

// Rows [first, first + count) of a batch.
inline Results rows_of(const Results& all, const Heads& heads, int64_t first, int64_t count) {
  const int64_t width = int64_t{heads.qo_heads()} * heads.dims;
  return {{all.out.begin() + first * width, all.out.begin() + (first + count) * width},
          {all.lse.begin() + first * heads.qo_heads(),
           all.lse.begin() + (first + count) * heads.qo_heads()}};
}

inline bool same(const Results& a, const Results& b) {
  const bool all = same(a.out, b.out) && same(a.lse, b.lse);
  if (!all) {
    std::printf("results: %s\nlogarithms of sums: %s\n", difference(a.out, b.out).c_str(),
                difference(a.lse, b.lse).c_str());
  }
  return all;
}

}  // namespace effinfer
