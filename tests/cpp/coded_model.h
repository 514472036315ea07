// Pages of both kinds, attention over them, and what that is in double precision: for tests of
// pages in fewer bits (ops/coded_pages.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "coded_reader.h"
#include "ops/attention.h"
#include "ops/encode_pages.h"
#include "ops/registry.h"

namespace effinfer::coded {

using namespace ops;

// Pages of bf16 or f32 and as many coded ones.
struct BothKinds {
  std::vector<uint8_t> k, v;
  std::vector<uint8_t> coded;
  KvLayer layer;

  BothKinds(DType dtype, int32_t bits, int32_t pages, int32_t heads, int32_t dim,
            std::mt19937& random, int32_t rank = 0, int32_t outliers = 0) {
    layer = {dtype,   heads,   dim,
             pages,   nullptr, nullptr,
             nullptr, nullptr, {bits, pages, heads, dim, nullptr, rank, outliers}};
    k.resize(layer.head_bytes() * static_cast<size_t>(pages * heads));
    v.resize(k.size());
    coded.resize(layer.coded.head_bytes() * static_cast<size_t>(pages * heads));
    layer.k = k.data();
    layer.v = v.data();
    layer.coded.data = coded.data();
    std::normal_distribution<float> normal;
    for_heads([&](int32_t page, int64_t head) {
      for (int64_t t = 0; t < kPageSize; ++t) {
        for (int64_t d = 0; d < dim; ++d) {
          // Channels, and tokens, of several magnitudes around several centres; one is constant.
          const auto number = [&](int64_t i) {
            const float scale = std::ldexp(1.0f, static_cast<int>(i % 9) - 6);
            return i == 5 ? 1.5f : (normal(random) + static_cast<float>(i % 5)) * scale;
          };
          set_key(page, head, t, d, number(d));
          set_value(page, head, t, d, number(t));
        }
      }
    });
  }

  template <class F>
  void for_heads(F&& f) const {
    for (int32_t page = 0; page < layer.num_pages; ++page) {
      for (int64_t head = 0; head < layer.num_kv_heads; ++head) f(page, head);
    }
  }
  int64_t pair() const { return layer.dtype == DType::f32 ? 1 : 2; }
  float at(const uint8_t* data, int64_t place) const {
    if (pair() == 1) return reinterpret_cast<const float*>(data)[place];
    return bf16_to_f32(reinterpret_cast<const uint16_t*>(data)[place]);
  }
  void set(uint8_t* data, int64_t place, float x) const {
    if (pair() == 1) {
      reinterpret_cast<float*>(data)[place] = x;
    } else {
      reinterpret_cast<uint16_t*>(data)[place] = f32_to_bf16(x);
    }
  }
  float key(int32_t page, int64_t head, int64_t t, int64_t d) const {
    return at(layer.k_head(page, head), k_offset(t, d, layer.head_dim, pair()));
  }
  float value(int32_t page, int64_t head, int64_t t, int64_t d) const {
    return at(layer.v_head(page, head), v_offset(t, d, layer.head_dim, pair()));
  }
  void set_key(int32_t page, int64_t head, int64_t t, int64_t d, float x) const {
    set(layer.k_head(page, head), k_offset(t, d, layer.head_dim, pair()), x);
  }
  void set_value(int32_t page, int64_t head, int64_t t, int64_t d, float x) const {
    set(layer.v_head(page, head), v_offset(t, d, layer.head_dim, pair()), x);
  }

  void encode(const Variant<EncodePagesProblem>& variant, ThreadPool& pool) {
    std::vector<PageCoding> all;
    for (int32_t i = 0; i < layer.num_pages; ++i) all.push_back({i, layer.num_pages + i});
    const EncodePagesProblem problem = {&layer, 1, all.data(), layer.num_pages};
    CHECK(variant.rejects(problem) == nullptr);
    pool.parallel([&](Team& team) { variant.run(problem, team); });
  }
};

struct Batch {
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, kv_indices, kv_len;

  // With the first `num_coded` pages coded.
  void add(int32_t length, int32_t rows, int32_t num_coded, int32_t num_pages,
           std::mt19937& random) {
    qo_indptr.push_back(qo_indptr.back() + rows);
    for (int32_t i = 0; i * kPageSize < length; ++i) {
      kv_indices.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(num_pages)) +
                           (i < num_coded ? num_pages : 0));
    }
    kv_indptr.push_back(static_cast<int32_t>(kv_indices.size()));
    kv_len.push_back(length);
  }
  BatchLayout layout() const {
    BatchLayout layout;
    layout.num_tokens = qo_indptr.back();
    layout.num_sequences = static_cast<int64_t>(kv_len.size());
    layout.qo_indptr = qo_indptr.data();
    layout.kv_indptr = kv_indptr.data();
    layout.kv_indices = kv_indices.data();
    layout.kv_len = kv_len.data();
    return layout;
  }
};

inline Batch random_batch(int32_t num_pages, std::mt19937& random) {
  Batch batch;
  for (int i = 0; i < 4; ++i) {
    const auto length = static_cast<int32_t>(1 + random() % 700);
    const int32_t most = std::min(length, i % 2 == 0 ? 1 : 70);
    const auto rows = static_cast<int32_t>(1 + random() % static_cast<uint32_t>(most));
    const int32_t before = (length - rows) / static_cast<int32_t>(kPageSize);
    const auto coded = static_cast<int32_t>(random() % static_cast<uint32_t>(before + 1));
    batch.add(length, rows, coded, num_pages, random);
  }
  return batch;
}

struct Call {
  AttentionWork work;
  std::vector<float> q, partial_out, partial_ms;
  std::vector<int32_t> done;
  AttentionProblem problem;

  Call(const BothKinds& pages, const Batch& batch, int32_t heads, Arithmetic arithmetic,
       std::mt19937& random) {
    const KvLayer& kv = pages.layer;
    AttentionShape shape;
    shape.num_qo_heads = heads;
    shape.num_kv_heads = kv.num_kv_heads;
    shape.head_dim = kv.head_dim;
    const BatchLayout layout = batch.layout();
    plan_attention(shape, layout, work);
    const int64_t cols = int64_t{heads} * kv.head_dim;
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(layout.num_tokens * cols));
    for (float& value : q) value = normal(random);
    done.resize(work.merges.size());
    partial_out.resize(static_cast<size_t>(work.num_partials * kv.head_dim));
    partial_ms.resize(static_cast<size_t>(work.num_partials * 2));
    problem.q = {reinterpret_cast<const uint8_t*>(q.data()), DType::f32, kv.head_dim, cols,
                 kv.head_dim};
    problem.out_stride = cols;
    problem.num_qo_heads = heads;
    problem.num_kv_heads = kv.num_kv_heads;
    problem.k = keys_of(kv);
    problem.v = values_of(kv);
    problem.coded = kv.coded;
    problem.batch = layout;
    problem.work = work;
    problem.done = done.data();
    problem.partial_out = partial_out.data();
    problem.partial_ms = partial_ms.data();
    problem.sm_scale = 4.0f / static_cast<float>(kv.head_dim);
    problem.arithmetic = arithmetic;
  }

  std::vector<float> run(const Variant<AttentionProblem>& variant, ThreadPool& pool) {
    std::vector<float> out(q.size());
    problem.out = reinterpret_cast<uint8_t*>(out.data());
    pool.reserve_scratch(variant.scratch_bytes(problem));
    pool.parallel([&](Team& team) { variant.run(problem, team); });
    return out;
  }
};

// Rows of a call in double precision, over what codes stand for.
class Reference {
 public:
  Reference(const BothKinds& pages, const Batch& batch, const Call& call)
      : pages_(pages),
        batch_(batch),
        call_(call),
        narrow_(call.problem.arithmetic == Arithmetic::bf16) {
    const auto read = [&](const uint8_t* data, int64_t place) {
      return Number{pages.at(data, place), 0.0};
    };
    pages.for_heads([&](int32_t page, int64_t head) {
      const KvLayer& kv = pages.layer;
      const CodedReader reader(kv.coded, kv.num_pages + page, head);
      for (int64_t t = 0; t < kPageSize; ++t) {
        for (int64_t d = 0; d < kv.head_dim; ++d) {
          keys_.push_back(read(kv.k_head(page, head), k_offset(t, d, kv.head_dim, pages.pair())));
          values_.push_back(read(kv.v_head(page, head), v_offset(t, d, kv.head_dim, pages.pair())));
          const CodedReader::Number key = reader.key(t, d);
          const CodedReader::Number value = reader.value(t, d);
          coded_keys_.push_back({key.value, key.step});
          coded_values_.push_back({value.value, value.step});
        }
      }
    });
  }

  struct Result {
    double value;
    double bound;  // of the error
  };
  // Of a row of a sequence, heads and dimensions; `words` are the visited tokens.
  std::vector<Result> results(size_t s, int32_t row, const uint64_t* words = nullptr) {
    const int32_t heads = call_.problem.num_qo_heads;
    const int64_t dim = pages_.layer.head_dim;
    std::vector<Result> results;
    for (int32_t head = 0; head < heads; ++head) {
      const int64_t kv_head = head / (heads / pages_.layer.num_kv_heads);
      const int64_t first = row * call_.problem.out_stride + head * dim;
      weigh(s, row, kv_head, &call_.q[index(first)], words);
      for (int64_t d = 0; d < dim; ++d) results.push_back(result(s, kv_head, d));
    }
    return results;
  }
  // The greatest error of results by what it may be.
  static double worst_error(const std::vector<Result>& expected, const float* got) {
    double worst = 0;
    for (const Result& result : expected) {
      worst = std::max(worst, std::abs(*got++ - result.value) / result.bound);
    }
    return worst;
  }

 private:
  static constexpr double kHalfUnit = 0x1p-16 * 1.001;  // of a 16-bit integer, by the greatest
  static size_t index(int64_t i) { return static_cast<size_t>(i); }

  struct Number {
    double value;
    double step;  // 0: of a page as it was written
  };
  const Number* row_of(size_t s, int64_t t, int64_t head, bool key) const {
    const KvLayer& kv = pages_.layer;
    const int32_t page = batch_.kv_indices[index(batch_.kv_indptr[s] + t / kPageSize)];
    const bool coded = kv.coded.holds(page);
    const int64_t at = (page % kv.num_pages) * kv.num_kv_heads + head;
    const auto& numbers = key ? (coded ? coded_keys_ : keys_) : (coded ? coded_values_ : values_);
    return &numbers[index((at * kPageSize + t % kPageSize) * kv.head_dim)];
  }
  double most_code() const { return (1 << pages_.layer.coded.bits) - 1; }

  // Sets the row's weights and by how much, at most, those that are got differ: the logits by the
  // rounding of the queries (to bfloat16, and of their products with steps to 16 bits) and of
  // float32 sums, the weights by twice that and their own rounding.
  void weigh(size_t s, int32_t row, int64_t head, const float* q, const uint64_t* words) {
    const int64_t dim = pages_.layer.head_dim;
    const int32_t end = batch_.kv_len[s] - (batch_.qo_indptr[s + 1] - row) + 1;
    weights_.assign(index(end), 0.0);
    double off = 0;
    double highest = -1e300;
    std::vector<double> logits(index(end));
    for (int64_t t = 0; t < end; ++t) {
      const Number* key = row_of(s, t, head, true);
      double sum = 0, magnitude = 0, largest = 0;
      for (int64_t d = 0; d < dim; ++d) {
        sum += double{q[d]} * key[d].value;
        magnitude += std::abs(q[d]) * (std::abs(key[d].value) + 2 * most_code() * key[d].step);
        largest = std::max(largest, std::abs(q[d] * key[d].step));
      }
      const double rounded = static_cast<double>(dim) * most_code() * largest * kHalfUnit;
      const double scale = call_.problem.sm_scale;
      logits[index(t)] = sum * scale;
      off = std::max(off, scale * (rounded + magnitude * rounding()));
      if (seen(words, t)) highest = std::max(highest, logits[index(t)]);
    }
    double total = 0;
    for (int64_t t = 0; t < end; ++t) {
      if (seen(words, t)) total += weights_[index(t)] = std::exp(logits[index(t)] - highest);
    }
    for (double& weight : weights_) weight /= total;
    weights_off_ = std::expm1(2 * off) + rounding();
  }
  static bool seen(const uint64_t* words, int64_t t) {
    return words == nullptr || (words[t / kPageSize] >> t % kPageSize & 1) != 0;
  }
  double rounding() const { return (narrow_ ? 0x1p-8 : 0.0) + 64 * 0x1p-24; }

  // Dimension d. Weights times steps of a page are 16-bit integers, too.
  Result result(size_t s, int64_t head, int64_t d) const {
    Result result = {0, 1e-7};
    double largest = 0;
    for (int64_t t = 0; t < static_cast<int64_t>(weights_.size()); ++t) {
      const Number& value = row_of(s, t, head, false)[d];
      const double weight = weights_[index(t)];
      result.value += weight * value.value;
      result.bound +=
          weights_off_ * weight * (std::abs(value.value) + 2 * most_code() * value.step);
      if (t % kPageSize == 0) largest = 0;
      largest = std::max(largest, weight * value.step);
      if (t % kPageSize == kPageSize - 1) {
        result.bound += (1 + weights_off_) * kPageSize * most_code() * largest * kHalfUnit;
      }
    }
    return result;
  }

  const BothKinds& pages_;
  const Batch& batch_;
  const Call& call_;
  const bool narrow_;
  std::vector<Number> keys_, values_, coded_keys_, coded_values_;  // [page][head][token][dim]
  std::vector<double> weights_;
  double weights_off_ = 0;
};

}  // namespace effinfer::coded
