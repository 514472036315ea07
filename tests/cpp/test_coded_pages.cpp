// Pages in 4 and 2 bits: how near codes are to what they stand for, and attention over pages of
// both kinds, which has the bits of attention over the numbers that codes stand for.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "coded_reader.h"
#include "core/backend.h"
#include "ops/attention.h"
#include "ops/encode_pages.h"
#include "ops/registry.h"

using namespace effinfer;
using namespace effinfer::ops;

namespace {

// Pages of bf16 or f32 and as many coded ones.
struct BothKinds {
  std::vector<uint8_t> k, v;
  std::vector<uint8_t> coded;
  KvLayer layer;

  BothKinds(DType dtype, int32_t bits, int32_t pages, int32_t heads, int32_t dim,
            std::mt19937& random) {
    layer = {dtype,   heads,   dim,
             pages,   nullptr, nullptr,
             nullptr, nullptr, {bits, pages, heads, dim, nullptr}};
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

  // What codes stand for takes the place of what they were made of.
  void replace() const {
    for_heads([&](int32_t page, int64_t head) {
      const CodedReader reader(layer.coded, layer.num_pages + page, head);
      const auto rounded = [](float x) { return bf16_to_f32(f32_to_bf16(x)); };
      for (int64_t t = 0; t < kPageSize; ++t) {
        for (int64_t d = 0; d < layer.head_dim; ++d) {
          set_key(page, head, t, d, rounded(reader.key(t, d).value));
          set_value(page, head, t, d, rounded(reader.value(t, d).value));
        }
      }
    });
  }
};

// Of numbers from `lowest` on to the nearest code: half a step, but at the ends what rounding the
// range to binary16 moved them: 2^-11 of its numbers, or half of the least one.
double bound(const CodedReader::Number& number, double lowest, int bits) {
  const double most_code = (1 << bits) - 1;
  const double f16 = 0x1p-11, least = 0x1p-25;
  const double inside = number.step * (0.5 + 0x1p-16);
  const double below = std::abs(lowest) * f16 + least;
  const double above = most_code * (number.step * 2 * f16 + least);
  return std::max({inside, below, above});
}

void check_codes(const BothKinds& pages, const Variant<EncodePagesProblem>& variant) {
  const KvLayer& kv = pages.layer;
  double worst = 0;  // error by bound
  pages.for_heads([&](int32_t page, int64_t head) {
    const CodedReader reader(kv.coded, kv.num_pages + page, head);
    const auto check = [&](auto&& number, auto&& given) {
      std::map<int64_t, float> lowest;  // by range
      for (int64_t i = 0; i < kPageSize * kv.head_dim; ++i) {
        const float x = given(i / kv.head_dim, i % kv.head_dim);
        const int64_t range = number(i / kv.head_dim, i % kv.head_dim).range;
        lowest[range] = std::min(lowest.emplace(range, x).first->second, x);
      }
      for (int64_t i = 0; i < kPageSize * kv.head_dim; ++i) {
        const CodedReader::Number found = number(i / kv.head_dim, i % kv.head_dim);
        const double error =
            std::abs(double{found.value} - given(i / kv.head_dim, i % kv.head_dim));
        worst = std::max(worst, error / bound(found, lowest[found.range], kv.coded.bits));
      }
      return lowest.size();
    };
    const size_t keys = check([&](int64_t t, int64_t d) { return reader.key(t, d); },
                              [&](int64_t t, int64_t d) { return pages.key(page, head, t, d); });
    CHECK_EQ(keys, static_cast<size_t>(kv.head_dim));  // a channel has its own
    const size_t values =
        check([&](int64_t t, int64_t d) { return reader.value(t, d); },
              [&](int64_t t, int64_t d) { return pages.value(page, head, t, d); });
    CHECK_EQ(values, static_cast<size_t>(4 * kv.head_dim / kv.coded.bits));
  });
  if (worst > 1.0) check::fail(variant.name.c_str(), kv.coded.bits, "codes are too far away");
}

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

Batch random_batch(int32_t num_pages, std::mt19937& random) {
  Batch batch;
  for (int i = 0; i < 5; ++i) {
    const auto length = static_cast<int32_t>(1 + random() % 900);
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
    problem.sm_scale = 0.1f;
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

// The last row of a sequence, in double precision, over pages that are not coded: the greatest
// relative distance of its heads.
double distance(const BothKinds& pages, const Batch& batch, const Call& call, size_t s,
                const std::vector<float>& got) {
  const KvLayer& kv = pages.layer;
  const int64_t dim = kv.head_dim;
  const int32_t heads = call.problem.num_qo_heads;
  const int64_t row = (batch.qo_indptr[s + 1] - 1) * call.problem.out_stride;
  double worst = 0;
  for (int32_t head = 0; head < heads; ++head) {
    const int64_t kv_head = head / (heads / kv.num_kv_heads);
    const auto first = static_cast<size_t>(row + head * dim);
    const auto page_of = [&](int64_t t) {
      return batch.kv_indices[static_cast<size_t>(batch.kv_indptr[s] + t / kPageSize)];
    };
    std::vector<double> weights;
    for (int64_t t = 0; t < batch.kv_len[s]; ++t) {
      double sum = 0;
      for (int64_t d = 0; d < dim; ++d) {
        sum += double{call.q[first + static_cast<size_t>(d)]} *
               pages.key(page_of(t), kv_head, t % kPageSize, d);
      }
      weights.push_back(sum * call.problem.sm_scale);
    }
    const double most = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (double& weight : weights) total += weight = std::exp(weight - most);
    double norm = 0, error = 0;
    for (int64_t d = 0; d < dim; ++d) {
      double expected = 0;
      for (int64_t t = 0; t < batch.kv_len[s]; ++t) {
        expected += weights[static_cast<size_t>(t)] / total *
                    pages.value(page_of(t), kv_head, t % kPageSize, d);
      }
      norm += expected * expected;
      error += std::pow(expected - got[first + static_cast<size_t>(d)], 2);
    }
    worst = std::max(worst, std::sqrt(error / norm));
  }
  return worst;
}

// Both kinds of a page hold the same numbers.
void check_attention(const BothKinds& pages, ThreadPool& pool, std::mt19937& random,
                     int& compared) {
  const int32_t count = pages.layer.num_pages;
  const Batch mixed = random_batch(count, random);
  Batch plain = mixed;
  for (int32_t& page : plain.kv_indices) page %= count;
  for (const Arithmetic arithmetic : {Arithmetic::f32, Arithmetic::bf16}) {
    Call call(pages, mixed, 6, arithmetic, random);
    for (const auto& variant : table<AttentionProblem>().variants()) {
      if (refusal(variant, call.problem, current_target()) != nullptr) continue;
      call.problem.batch = mixed.layout();
      const std::vector<float> got = call.run(variant, pool);
      call.problem.batch = plain.layout();
      CHECK(got == call.run(variant, pool));
      ++compared;
      if (arithmetic != Arithmetic::f32) continue;
      // Logits of some hundred are sums of float32 products: 2^-24 of them, dim times at most.
      const double tolerance = 300.0 * pages.layer.head_dim * 0x1p-24;
      for (size_t s = 0; s < plain.kv_len.size(); ++s) {
        CHECK(distance(pages, plain, call, s, got) < tolerance);
      }
    }
  }
}

}  // namespace

TEST("codes are the nearest ones, and the same at every level") {
  std::mt19937 random(1);
  ThreadPool pool(2);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int32_t bits : {4, 2}) {
      for (const int32_t dim : {16, 64, 80, 128, 256}) {
        BothKinds pages(dtype, bits, 3, 2, dim, random);
        std::vector<uint8_t> first;
        for (const auto& variant : table<EncodePagesProblem>().variants()) {
          if (variant.isa > current_isa()) continue;
          std::fill(pages.coded.begin(), pages.coded.end(), uint8_t{0xa5});
          pages.encode(variant, pool);
          check_codes(pages, variant);
          if (first.empty()) first = pages.coded;
          CHECK(first == pages.coded);
        }
      }
    }
  }
}

TEST("a coded page takes 28.1 or 17.2 % of a page") {
  for (const int32_t dim : {64, 128, 256}) {
    const CodedPages four = {4, 0, 1, dim, nullptr};
    const CodedPages two = {2, 0, 1, dim, nullptr};
    CHECK_EQ(four.head_bytes(), static_cast<size_t>(72 * dim));
    CHECK_EQ(two.head_bytes(), static_cast<size_t>(44 * dim));
  }
}

TEST("attention over coded pages has the bits of what their codes stand for") {
  std::mt19937 random(2);
  ThreadPool pool(2);
  int compared = 0;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int32_t bits : {4, 2}) {
      for (const int32_t dim : {16, 64, 80, 128, 256}) {
        BothKinds pages(dtype, bits, 7, 2, dim, random);
        pages.encode(table<EncodePagesProblem>().variants().front(), pool);
        pages.replace();
        check_attention(pages, pool, random, compared);
      }
    }
  }
  CHECK(compared >= 12);
}

TEST("attention visits words of coded pages") {
  std::mt19937 random(3);
  ThreadPool pool(2);
  constexpr int32_t kPages = 6;
  BothKinds pages(DType::bf16, 4, kPages, 1, 64, random);
  pages.encode(table<EncodePagesProblem>().variants().front(), pool);
  pages.replace();
  Batch mixed;
  mixed.add(6 * 64, 2, 4, kPages, random);
  Batch plain = mixed;
  for (int32_t& page : plain.kv_indices) page %= kPages;
  Call call(pages, mixed, 3, Arithmetic::f32, random);
  std::vector<uint64_t> words;
  for (int i = 0; i < 6; ++i) words.push_back(i % 2 == 0 ? random() : ~uint64_t{0});
  const int32_t first_block = 0;
  VisitPlan& visits = call.problem.visits;
  visits.num_blocks = 1;
  visits.first_block = &first_block;
  visits.num_kv_heads = 1;
  visits.list_words = 6;
  visits.words = words.data();
  for (const auto& variant : table<AttentionProblem>().variants()) {
    if (refusal(variant, call.problem, current_target()) != nullptr) continue;
    call.problem.batch = mixed.layout();
    const std::vector<float> got = call.run(variant, pool);
    call.problem.batch = plain.layout();
    const std::vector<float> expected = call.run(variant, pool);
    // Few tokens of a page are gathered where it is not coded, which sums in another order.
    for (size_t i = 0; i < got.size(); ++i) CHECK(std::abs(got[i] - expected[i]) < 1e-4f * 8);
  }
}

CHECK_MAIN()
