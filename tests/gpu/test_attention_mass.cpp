// What keys get of the attention of a step's last rows, into planes of pinned memory, against
// float64.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cpp/check.h"
#include "gpu/attention_batch.h"
#include "gpu/mutations.h"
#include "ops/attention_mass.h"

namespace effinfer {
namespace {

// The last rows of the first `length` tokens of a sequence.
struct Scored {
  int sequence;
  int32_t length;
  int32_t rows;   // of the step
  int32_t count;  // that are scored
  bool has_noise = false;
};

// A step some of whose rows are scored, in layer 1 of planes of three.
class Step {
 public:
  // `room`: slots of planes, or what the longest sequences need and a page.
  Step(const Cache& cache, const std::vector<Scored>& parts, ops::MassRule rule = {},
       int64_t room = 0)
      : cache_(cache), parts_(parts), rule_(rule) {
    const Heads& heads = cache.heads();
    const int64_t width = int64_t{heads.qo_heads()} * heads.dims;
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    qo_indptr_ = kv_indptr_ = {0};
    for (const Scored& part : parts) {
      const Sequence& s = cache.sequence(part.sequence);
      q_.insert(q_.end(), s.q.begin() + (part.length - part.rows) * width,
                s.q.begin() + part.length * width);
      qo_indptr_.push_back(qo_indptr_.back() + part.rows);
      kv_len_.push_back(part.length);
      kv_indices_.insert(kv_indices_.end(), s.pages.begin(),
                         s.pages.begin() + (part.length + 63) / 64);
      kv_indptr_.push_back(static_cast<int32_t>(kv_indices_.size()));
      stride_.push_back(room > 0 ? room : (part.length + 63) / 64 * 64 + 64);
      const auto size = static_cast<size_t>(3 * heads.kv_heads * stride_.back());
      before_.emplace_back(size);
      noise_.emplace_back(size);
      for (float& x : before_.back()) x = std::abs(normal(random));
      for (float& x : noise_.back()) x = normal(random);
    }
  }

  void begin_with(const std::vector<std::vector<float>>& planes) { before_ = planes; }

  // Planes afterwards.
  std::vector<std::vector<float>> on_gpu(float noise = 0.0f) const {
    const Heads& heads = cache_.heads();
    const DeviceArray<float> q(q_);
    const DeviceArray<int32_t> qo(qo_indptr_), kv(kv_indptr_), pages(kv_indices_), len(kv_len_);
    std::vector<std::shared_ptr<std::byte>> planes, noises;
    std::vector<ops::MassRows> rows;
    ops::AttentionMassProblem p;
    for (size_t i = 0; i < parts_.size(); ++i) {
      planes.push_back(pinned(before_[i]));
      noises.push_back(pinned(noise_[i]));
      const auto* added = reinterpret_cast<const float*>(noises.back().get());
      rows.push_back({reinterpret_cast<float*>(planes.back().get()), stride_[i],
                      parts_[i].has_noise ? added : nullptr, stride_[i], static_cast<int32_t>(i),
                      parts_[i].count});
      p.most_count = std::max(p.most_count, parts_[i].count);
      p.max_kv_len = std::max(p.max_kv_len, parts_[i].length);
    }
    const DeviceArray<ops::MassRows> scored(rows);
    const auto num_rows = static_cast<int64_t>(rows.size());
    const DeviceArray<float> sums(
        static_cast<size_t>(ops::mass_sums(num_rows, heads.kv_heads, p.max_kv_len)));
    p.q = q.data();
    p.q_stride = int64_t{heads.qo_heads()} * heads.dims;
    p.num_qo_heads = heads.qo_heads();
    p.kv = cache_.layer();
    p.batch.num_sequences = num_rows;
    p.batch.qo_indptr = qo.data();
    p.batch.kv_indptr = kv.data();
    p.batch.kv_indices = pages.data();
    p.batch.kv_len = len.data();
    p.sm_scale = scale();
    p.noise = noise;
    p.rule = rule_;
    p.first_head = heads.kv_heads;
    p.rows = scored.data();
    p.num_rows = static_cast<int32_t>(num_rows);
    p.sums = sums.data();
    run_on_gpu(p);
    std::vector<std::vector<float>> after;
    for (size_t i = 0; i < planes.size(); ++i) {
      const auto* values = reinterpret_cast<const float*>(planes[i].get());
      after.emplace_back(values, values + before_[i].size());
    }
    return after;
  }

  // Naive, of one of the parts.
  std::vector<double> expected(size_t index, float noise = 0.0f) const {
    const Heads& heads = cache_.heads();
    const Scored& part = parts_[index];
    const Sequence& s = cache_.sequence(part.sequence);
    std::vector<double> plane(before_[index].begin(), before_[index].end());
    for (int32_t at = part.length - part.count; at < part.length; ++at) {
      for (int32_t head = 0; head < heads.qo_heads(); ++head) {
        const int32_t kv_head = head / heads.group;
        const auto row = static_cast<size_t>((heads.kv_heads + kv_head) * stride_[index]);
        std::vector<double> x;
        for (int32_t key = 0; key <= at; ++key) {
          double sum = 0.0;
          for (int32_t d = 0; d < heads.dims; ++d) {
            sum += double{s.q[index_of(at, head, d, heads.qo_heads(), heads.dims)]} *
                   s.k[index_of(key, kv_head, d, heads.kv_heads, heads.dims)];
          }
          sum *= s.k_scale[static_cast<size_t>(key * heads.kv_heads + kv_head)] * double{scale()};
          if (part.has_noise) sum += double{noise} * noise_[index][row + static_cast<size_t>(key)];
          x.push_back(sum);
        }
        const double highest = *std::max_element(x.begin(), x.end());
        double total = 0.0;
        for (double& value : x) total += value = std::exp(value - highest);
        for (size_t key = 0; key < x.size(); ++key) {
          double& number = plane[row + key];
          if (head % heads.group == 0) number *= rule_.decay;
          number = rule_.maximum ? std::max(number, x[key] / total) : number + x[key] / total;
        }
      }
    }
    return plane;
  }

  // Logits are sums of `dims` products that round, and are below 30; powers of two are within a few
  // units of the last place; a plane's number is a sum of as many as rows and heads, which each row
  // multiplies once.
  void check(float noise = 0.0f) const {
    const std::vector<std::vector<float>> got = on_gpu(noise);
    const double each = (cache_.heads().dims * 30 / 4 + 40) * 0x1p-24;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const std::vector<double> wanted = expected(i, noise);
      const double sums = parts_[i].count * (cache_.heads().group + 1) * 0x1p-24;
      for (size_t at = 0; at < wanted.size(); ++at) {
        if (wanted[at] == double{before_[i][at]}) {
          CHECK(got[i][at] == before_[i][at]);  // another layer's, or of no key
        } else {
          CHECK(std::abs(got[i][at] - wanted[at]) <= (each + sums) * wanted[at]);
        }
      }
    }
  }

 private:
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(cache_.heads().dims)); }
  static std::shared_ptr<std::byte> pinned(const std::vector<float>& values) {
    const size_t bytes = values.size() * sizeof(float);
    std::shared_ptr<std::byte> memory = cuda_backend()->pinned(0, bytes);
    std::memcpy(memory.get(), values.data(), bytes);
    return memory;
  }

  const Cache& cache_;
  const std::vector<Scored> parts_;
  const ops::MassRule rule_;
  std::vector<float> q_;
  std::vector<int32_t> qo_indptr_, kv_indptr_, kv_indices_, kv_len_;
  std::vector<int64_t> stride_;
  std::vector<std::vector<float>> before_, noise_;
};

TEST("probabilities of the last rows are added to planes") {
  struct Case {
    Heads heads;
    std::vector<Scored> parts;
    ops::MassRule rule = {};
  };
  const std::vector<Case> cases = {
      {{DType::f32, 16, 2, 3}, {{0, 130, 9, 4}, {1, 1, 1, 1}}},
      {{DType::bf16, 64, 1, 4}, {{0, 300, 40, 33}, {1, 64, 64, 64, true}}},
      {{DType::bf16, 16, 2, 3}, {{0, 190, 40, 33}, {1, 64, 64, 64, true}}, {0.9f}},
      {{DType::f32, 32, 1, 5}, {{0, 140, 30, 29}, {1, 5, 5, 5}}, {0.5f, true}},
      {{DType::f32, 16, 1, 2}, {{0, 70, 3, 3}}, {0.0f}},
      {{DType::f16, 48, 2, 1}, {{0, 1100, 3, 2}, {1, 77, 1, 1}}},
      {{DType::i8, 128, 1, 2}, {{0, 200, 5, 5, true}, {1, 129, 2, 1}}},
  };
  for (const Case& each : cases) {
    Cache cache(each.heads, 21);
    for (const Scored& part : each.parts) cache.add(part.length + 3);
    cache.upload();
    Step(cache, each.parts, each.rule).check(0.4f);
  }
}

TEST("rows of one step have the bits of a step each") {
  Cache cache({DType::bf16, 32, 2, 3}, 4);
  cache.add(200);
  cache.upload();
  for (const ops::MassRule rule : {ops::MassRule{}, {0.9f}, {0.9f, true}}) {
    // More rows and heads than one launch has, which ends within a row.
    const std::vector<std::vector<float>> together = Step(cache, {{0, 200, 30, 30}}, rule).on_gpu();
    std::vector<std::vector<float>> one_by_one;
    for (int32_t length = 171; length <= 200; ++length) {
      Step step(cache, {{0, length, 1, 1}}, rule, 320);
      if (!one_by_one.empty()) step.begin_with(one_by_one);
      one_by_one = step.on_gpu();
    }
    CHECK(one_by_one == together);
  }
}

TEST("every barrier is needed") {
  Cache cache({DType::bf16, 32, 1, 3}, 5);
  cache.add(300);
  cache.upload();
  const Step step(cache, {{0, 300, 12, 12}}, {0.8f});
  const std::vector<std::vector<float>> expected = step.on_gpu();
  expect_every_barrier_matters([&] { return step.on_gpu() == expected; }, 8);
}

TEST("what the kernels cannot do is refused") {
  ops::AttentionMassProblem p;
  p.kv.dtype = DType::bf16;
  p.kv.num_kv_heads = p.num_qo_heads = 1;
  p.kv.head_dim = 272;
  CHECK_THROWS(Unsupported, "multiple of 16 up to 256", run_on_gpu(p));
  p.kv.head_dim = 64;
  p.arithmetic = ops::Arithmetic::int8;
  CHECK_THROWS(Unsupported, "multiplies in f32", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
