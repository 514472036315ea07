// Latent attention over a caller's pages, against float64.
#include <effinfer/error.h>
#include <effinfer/ops/attention.h>

#include <algorithm>
#include <cmath>
#include <optional>
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
  bool lists = false;   // of half the rows of a sequence each, of spans that are drawn
  bool masked = false;  // and a mask of these
};

// What rows of a sequence see of it: spans of tokens, and of these the bits of a mask.
struct Lists {
  std::vector<int32_t> lists, indptr = {0}, spans;
  std::vector<int64_t> bits;
  std::vector<uint8_t> mask;
  static constexpr int64_t kStride = 2048;  // bits between rows

  Lists(const CallerBatch& batch, bool masked, std::mt19937& random) {
    for (size_t s = 0; s < batch.kv_len.size(); ++s) {
      const int32_t rows = batch.qo_indptr[s + 1] - batch.qo_indptr[s];
      add(static_cast<int32_t>(s), batch.kv_len[s], batch.qo_indptr[s], rows / 2, random);
      add(static_cast<int32_t>(s), batch.kv_len[s], batch.qo_indptr[s] + rows / 2, rows - rows / 2,
          random);
    }
    // Spans of one list lie one behind the other in its rows.
    if (masked) mask.resize(static_cast<size_t>(most_rows_ * kStride / 8));
    for (uint8_t& byte : mask) byte = static_cast<uint8_t>(random());
  }

  ops::AttentionLists views() const {
    const auto of = [](const auto& values, DType dtype, Dims dims) {
      return TensorView{const_cast<void*>(static_cast<const void*>(values.data())), dtype, dims};
    };
    const auto count = static_cast<int64_t>(spans.size() / 2);
    ops::AttentionLists views;
    views.lists = of(lists, DType::i32, {static_cast<int64_t>(lists.size() / 4), 4});
    views.indptr = of(indptr, DType::i32, {static_cast<int64_t>(indptr.size())});
    views.spans = of(spans, DType::i32, {count, 2});
    if (!mask.empty()) views.span_masks = of(bits, DType::i64, {count});
    views.mask_row_stride = mask.empty() ? 0 : kStride;
    return views;
  }

  bool sees(int32_t row, int32_t token) const {
    size_t list = 0;
    while (row >= lists[4 * list + 2] + lists[4 * list + 3]) ++list;
    for (auto i = static_cast<size_t>(indptr[list]); i < static_cast<size_t>(indptr[list + 1]);
         ++i) {
      if (token < spans[2 * i] || token >= spans[2 * i + 1]) continue;
      const int64_t bit = bits[i] + (row - lists[4 * list + 2]) * kStride + token - spans[2 * i];
      return mask.empty() || (mask[static_cast<size_t>(bit / 8)] >> bit % 8 & 1) != 0;
    }
    return false;
  }

 private:
  void add(int32_t sequence, int32_t length, int32_t first, int32_t rows, std::mt19937& random) {
    if (rows == 0) return;
    lists.insert(lists.end(), {sequence, 0, first, rows});
    most_rows_ = std::max<int64_t>(most_rows_, rows);
    int64_t bit = 3;
    for (int32_t token = 0;;) {
      const auto begin = token + static_cast<int32_t>(random() % 50);
      const auto end = std::min(length, begin + 1 + static_cast<int32_t>(random() % 40));
      if (begin >= end) break;
      spans.insert(spans.end(), {begin, end});
      bits.push_back(bit);
      bit += end - begin + 5;
      token = end + 1;
    }
    indptr.push_back(static_cast<int32_t>(spans.size() / 2));
  }

  int64_t most_rows_ = 1;
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
    if (c.lists) lists.emplace(*this, c.masked, random);
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
    if (lists) {
      plan_attention(shape, layout(), lists->views(), made);
    } else {
      plan_attention(shape, layout(), made);
    }
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
    const DeviceArray<uint8_t> mask(lists ? lists->mask : std::vector<uint8_t>());
    const DeviceArray<int64_t> strides(std::vector<int64_t>(kv_len.size(), Lists::kStride));
    if (mask.size() > 0) {
      p.mask = mask.data();
      p.mask_bytes = static_cast<int64_t>(mask.size());
      p.mask_row_strides = strides.data();
    }
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
      if (lists && !lists->sees(row / c.heads, t)) continue;
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
  std::optional<Lists> lists;
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
           Case{.kv_len = {40, 900}, .rows = {9, 3}, .heads = 3, .lists = true},
           Case{.kv_len = {300, 0, 70},
                .rows = {5, 0, 2},
                .causal = false,
                .lists = true,
                .masked = true},
           Case{.kv_len = {700},
                .rows = {2},
                .window_left = 300,
                .narrow = true,
                .lists = true,
                .masked = true},
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

TEST("a plan with lists of spans runs over latent keys") {
  const Latent latent(
      {.kv_len = {40, 300}, .rows = {9, 2}, .dims = 512, .rope = 64, .lists = true});
  const int64_t heads = latent.c.heads;
  const int64_t width = latent.c.dims + latent.c.rope;
  const ops::AttentionPlan plan({.num_qo_heads = latent.c.heads,
                                 .num_kv_heads = 1,
                                 .head_dim_qk = 576,
                                 .head_dim_vo = 512,
                                 .page_size = 16,
                                 .causal = true},
                                {ints(latent.qo_indptr),
                                 ints(latent.kv_indptr),
                                 ints(latent.kv_indices),
                                 ints(latent.kv_len),
                                 {},
                                 {}},
                                latent.lists->views());
  const auto part = [&](uint16_t* data, Dims dims, std::vector<int64_t> strides, int64_t first) {
    StridedView view = StridedView::dense(data + first, DType::bf16, dims);
    std::ranges::copy(strides, view.strides.begin());
    view.device = kGpu;
    return view;
  };
  const int64_t rows = latent.num_rows();
  const int64_t pages = latent.num_pages();
  const std::vector<int64_t> by_row = {heads * width, width, 1};
  const std::vector<int64_t> by_page = {16 * width, width, width, 1};
  ops::AttentionInputs in;
  in.q = part(latent.q_there.data(), {rows, heads, 512}, by_row, 0);
  in.q_rope = part(latent.q_there.data(), {rows, heads, 64}, by_row, 512);
  in.k = in.v = part(latent.kv_there.data(), {pages, 16, 1, 512}, by_page, 0);
  in.k_rope = part(latent.kv_there.data(), {pages, 16, 1, 64}, by_page, 512);
  in.sm_scale = 0.09f;
  const DeviceArray<uint16_t> out(static_cast<size_t>(rows * heads * 512));
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  plan.run(in, part(out.data(), {rows, heads, 512}, {heads * 512, 512, 1}, 0), {}, *queue);
  queue->wait();
  std::vector<float> got;
  for (const uint16_t x : out.values()) got.push_back(bf16_to_f32(x));
  CHECK(got == latent.run(1));
}

TEST("latent attention needs each of its barriers") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("races are not detected in this build");
  }
  for (const bool narrow : {false, true}) {
    const Latent latent({.kv_len = {300},
                         .rows = {1},
                         .heads = 18,
                         .dims = 32,
                         .rope = 16,
                         .narrow = narrow,
                         .lists = narrow,
                         .masked = narrow});
    const std::vector<float> right = latent.run(1);
    expect_every_barrier_matters(
        [&] { return latent.run(1) == right && latent.run(1000) == right; });
  }
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
