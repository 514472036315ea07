// Latent attention over a caller's pages, against float64.
#include <effinfer/error.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core/float16.h"
#include "core/float8.h"
#include "cpp/arrays.h"
#include "cpp/check.h"
#include "gpu/caller_batch.h"
#include "gpu/device_arrays.h"
#include "gpu/device_work.h"
#include "gpu/mutations.h"
#include "ops/attention.h"
#include "ops/latent_tile.h"

namespace effinfer {
namespace {

struct Case {
  std::vector<int32_t> kv_len;
  std::vector<int32_t> rows;
  int32_t heads = 4;
  int32_t dims = 64;
  int32_t rope = 16;
  int32_t page_size = 16;
  bool causal = true;
  int32_t window_left = -1;
  int32_t sink_tokens = 0;
  bool narrow = false;  // pages of e4m3
};

struct Latent : CallerBatch {
  explicit Latent(const Case& given) : Latent(given, std::mt19937(5)) {}
  Latent(const Case& given, std::mt19937 random)
      : CallerBatch(given.kv_len, given.rows, given.page_size, random), c(given) {
    const int64_t width = c.dims + c.rope;
    q = as_bf16(normals(num_rows() * c.heads * width, random));
    kv = as_bf16(normals(int64_t{num_pages()} * c.page_size * width, random));
    if (c.narrow) {
      std::vector<uint8_t> bytes;
      for (uint16_t& x : kv) {
        bytes.push_back(f32_to_f8_e4m3(bf16_to_f32(x)));
        x = f32_to_bf16(f8_e4m3_to_f32(bytes.back()));
      }
      bytes_there = DeviceArray<uint8_t>(bytes);
    }
    q_there = DeviceArray<uint16_t>(q);
    kv_there = DeviceArray<uint16_t>(kv);
  }

  ops::AttentionWork work(int32_t shares) const {
    ops::AttentionShape shape;
    shape.source = ops::KeySource::rows;
    shape.num_qo_heads = c.heads;
    shape.num_kv_heads = 1;
    shape.head_dim = c.dims;
    shape.causal = c.causal;
    shape.window_left = c.window_left;
    shape.sink_tokens = c.sink_tokens;
    shape.most_rows = ops::kGpuLatentRows;
    shape.shares = shares;
    ops::AttentionWork made;
    plan_attention(shape, layout(), made);
    return made;
  }

  // Queries and pages are rows with the rotated part last.
  void point(ops::AttentionProblem& p) const {
    const int64_t width = c.dims + c.rope;
    const int64_t size = c.narrow ? 1 : 2;
    p.source = ops::KeySource::rows;
    p.num_qo_heads = c.heads;
    p.num_kv_heads = 1;
    p.page_size = c.page_size;
    p.causal = c.causal;
    p.window_left = c.window_left;
    p.sink_tokens = c.sink_tokens;
    p.sm_scale = 0.09f;
    const auto* queries = reinterpret_cast<const uint8_t*>(q_there.data());
    p.q = {queries, DType::bf16, c.dims, c.heads * width, width};
    p.q_rope = {queries + c.dims * 2, DType::bf16, c.rope, c.heads * width, width};
    p.k.data = c.narrow ? bytes_there.data() : reinterpret_cast<const uint8_t*>(kv_there.data());
    p.k.dtype = c.narrow ? DType::f8_e4m3 : DType::bf16;
    p.k.dims = c.dims;
    p.k.token_stride = width * size;
    p.k.page_stride = c.page_size * width * size;
    p.v = p.k_rope = p.k;
    p.k_rope.data += c.dims * size;
    p.k_rope.dims = c.rope;
  }

  // Cut into items for so many shares.
  std::vector<float> run(int32_t shares, std::vector<float>* sums = nullptr) const {
    const ops::AttentionWork made = work(shares);
    const DeviceWork work_there(made, c.dims);
    const DeviceBatch there(*this);
    const auto pairs = static_cast<size_t>(qo_indptr.back() * c.heads);
    const DeviceArray<uint16_t> out(pairs * static_cast<size_t>(c.dims));
    const DeviceArray<float> lse(pairs);
    ops::AttentionProblem p;
    point(p);
    p.batch = there.layout;
    work_there.point(p);
    p.out = reinterpret_cast<uint8_t*>(out.data());
    p.out_stride = int64_t{c.heads} * c.dims;
    p.lse = lse.data();
    run_on_gpu(p);
    std::vector<float> values;
    for (const uint16_t x : out.values()) values.push_back(bf16_to_f32(x));
    if (sums != nullptr) *sums = lse.values();
    return values;
  }

  // Of a row (head included): out, and the logarithm of the sum.
  double expect(int32_t sequence, int32_t row, std::vector<double>& out) const {
    const auto s = static_cast<size_t>(sequence);
    const int32_t token = row / c.heads - qo_indptr[s];
    const int32_t position = c.kv_len[s] - c.rows[s] + token;
    const auto width = static_cast<size_t>(c.dims + c.rope);
    const uint16_t* query = q.data() + static_cast<size_t>(row) * width;
    out.assign(static_cast<size_t>(c.dims), 0.0);
    double sum = 0.0;
    for (int32_t t = 0; t < c.kv_len[s]; ++t) {
      if (c.causal && t > position) continue;
      if (c.window_left >= 0 && t < position - c.window_left && t >= c.sink_tokens) continue;
      const int32_t page = kv_indices[static_cast<size_t>(kv_indptr[s] + t / c.page_size)];
      const uint16_t* key =
          kv.data() + static_cast<size_t>(page * c.page_size + t % c.page_size) * width;
      double score = 0.0;
      for (size_t d = 0; d < width; ++d) {
        score += static_cast<double>(bf16_to_f32(query[d])) * bf16_to_f32(key[d]);
      }
      const double weight = std::exp(score * 0.09);
      sum += weight;
      for (size_t d = 0; d < out.size(); ++d) out[d] += weight * bf16_to_f32(key[d]);
    }
    for (double& x : out) x = sum > 0.0 ? x / sum : 0.0;
    return std::log(sum);
  }

  void check(const std::vector<float>& out, const std::vector<float>& lse) const {
    int failures = 0;
    std::vector<double> expected;
    for (int32_t s = 0; s < static_cast<int32_t>(c.kv_len.size()); ++s) {
      const auto next = static_cast<size_t>(s) + 1;
      for (int32_t row = qo_indptr[next - 1] * c.heads; row < qo_indptr[next] * c.heads; ++row) {
        const double sum = expect(s, row, expected);
        const float got = lse[static_cast<size_t>(row)];
        const bool near = std::isinf(sum) ? std::isinf(got) : std::abs(got - sum) < 1e-3;
        failures += near ? 0 : 1;
        for (size_t d = 0; d < expected.size(); ++d) {
          // Weights are rounded to bfloat16, and so is the result; values are about 1.
          const float x = out[static_cast<size_t>(row) * expected.size() + d];
          const double bound = 0x1p-8 * (1.0 + std::abs(expected[d])) + 1e-4;
          failures += std::abs(x - expected[d]) <= bound ? 0 : 1;
        }
      }
    }
    CHECK_EQ(failures, 0);
  }

  Case c;
  std::vector<uint16_t> q, kv;
  DeviceArray<uint16_t> q_there, kv_there;
  DeviceArray<uint8_t> bytes_there;
};

TEST("latent attention is that of float64, and its bits not those of blocks") {
  for (const Case& c : {
           Case{.kv_len = {5, 0, 70}, .rows = {1, 0, 1}},
           Case{.kv_len = {40, 600}, .rows = {9, 2}, .heads = 3, .rope = 24},
           Case{.kv_len = {300}, .rows = {1}, .heads = 33, .dims = 512, .rope = 64},
           Case{.kv_len = {1100}, .rows = {2}, .window_left = 20, .sink_tokens = 300},
           Case{.kv_len = {33}, .rows = {2}, .dims = 144, .rope = 8, .page_size = 1},
           Case{.kv_len = {90}, .rows = {3}, .page_size = 7, .causal = false},
           Case{.kv_len = {40, 300}, .rows = {9, 2}, .dims = 512, .rope = 64, .narrow = true},
           Case{.kv_len = {33}, .rows = {2}, .dims = 144, .page_size = 1, .narrow = true},
       }) {
    const Latent latent(c);
    std::vector<float> lse, split_lse;
    const std::vector<float> out = latent.run(1, &lse);
    latent.check(out, lse);
    CHECK(latent.run(1000, &split_lse) == out);
    CHECK(split_lse == lse);
    CHECK(latent.run(2) == out);
  }
}

TEST("latent attention needs each of its barriers") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("races are not detected in this build");
  }
  for (const bool narrow : {false, true}) {
    const Latent latent(
        {.kv_len = {300}, .rows = {1}, .heads = 18, .dims = 32, .rope = 16, .narrow = narrow});
    const std::vector<float> right = latent.run(1);
    expect_every_barrier_matters(
        [&] { return latent.run(1) == right && latent.run(1000) == right; });
  }
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
