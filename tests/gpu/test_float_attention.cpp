// Attention and scores of keys in float32, over what the kernels on tensor cores do not take.
#include <effinfer/ops/attention_scores.h>

#include <cmath>
#include <numeric>

#include "cpp/check.h"
#include "gpu/caller_attention.h"
#include "gpu/mutations.h"

namespace effinfer {
namespace {

// The queries and caches of a Case in float32.
struct Floats : CallerBatch {
  explicit Floats(const Case& given) : Floats(given, std::mt19937(9)) {}
  Floats(const Case& given, std::mt19937 random)
      : CallerBatch(given.kv_len, given.rows, given.page_size, random),
        c(given),
        q(normals(int64_t{num_rows()} * c.heads * c.group * c.dims, random)),
        k(normals(int64_t{num_pages()} * c.page_size * c.heads * c.dims, random)),
        v(normals(int64_t{num_pages()} * c.page_size * c.heads * c.dims, random)),
        q_there(q),
        k_there(k),
        v_there(v) {}

  ops::AttentionSequences sequences() const {
    return {ints(qo_indptr), ints(kv_indptr), ints(kv_indices), ints(kv_len), {}, {}};
  }
  Dims q_dims() const { return {num_rows(), c.heads * c.group, c.dims}; }
  Dims kv_dims() const { return {num_pages(), c.page_size, c.heads, c.dims}; }

  template <class Inputs>
  Inputs inputs(const StridedView& queries, const StridedView& keys) const {
    Inputs in;
    in.q = queries;
    in.k = keys;
    in.sm_scale = 0.125f;
    return in;
  }
  template <class Inputs>
  Inputs here() const {
    return inputs<Inputs>(StridedView::dense(const_cast<float*>(q.data()), DType::f32, q_dims()),
                          StridedView::dense(const_cast<float*>(k.data()), DType::f32, kv_dims()));
  }
  template <class Inputs>
  Inputs there() const {
    return inputs<Inputs>(on_gpu(q_there, DType::f32, q_dims()),
                          on_gpu(k_there, DType::f32, kv_dims()));
  }

  // Results and logarithms of sums, one after the other.
  std::vector<float> attend_here() const {
    const ops::AttentionPlan plan(c.geometry(), sequences());
    auto in = here<ops::AttentionInputs>();
    in.v = StridedView::dense(const_cast<float*>(v.data()), DType::f32, kv_dims());
    std::vector<float> out(q.size());
    std::vector<float> lse(q.size() / static_cast<size_t>(c.dims));
    ThreadPool pool(1);
    plan.run(in, StridedView::dense(out.data(), DType::f32, q_dims()),
             StridedView::dense(lse.data(), DType::f32, {q_dims()[0], q_dims()[1]}), pool);
    out.insert(out.end(), lse.begin(), lse.end());
    return out;
  }
  std::vector<float> attend_there(Queue& queue) const {
    const ops::AttentionPlan plan(c.geometry(), sequences());
    auto in = there<ops::AttentionInputs>();
    in.v = on_gpu(v_there, DType::f32, kv_dims());
    const DeviceArray<float> out(q.size());
    const DeviceArray<float> lse(q.size() / static_cast<size_t>(c.dims));
    plan.run(in, on_gpu(out, DType::f32, q_dims()),
             on_gpu(lse, DType::f32, {q_dims()[0], q_dims()[1]}), queue);
    queue.wait();
    std::vector<float> values = out.values();
    const std::vector<float> sums = lse.values();
    values.insert(values.end(), sums.begin(), sums.end());
    return values;
  }

  // The same on the GPU, cut into items for so many shares; without values the sums alone.
  std::vector<float> attend_shares(int32_t shares, bool has_values) const {
    ops::AttentionProblem p;
    p.source = ops::KeySource::rows;
    p.num_qo_heads = c.heads * c.group;
    p.num_kv_heads = c.heads;
    p.page_size = c.page_size;
    p.causal = c.causal;
    p.sm_scale = 0.125f;
    p.q = {reinterpret_cast<const uint8_t*>(q_there.data()), DType::f32, c.dims,
           int64_t{p.num_qo_heads} * c.dims, c.dims};
    p.k.data = reinterpret_cast<const uint8_t*>(k_there.data());
    p.k.dims = c.dims;
    p.k.head_stride = c.dims * int64_t{4};
    p.k.token_stride = c.heads * p.k.head_stride;
    p.k.page_stride = c.page_size * p.k.token_stride;
    p.v = p.k;
    p.v.data = reinterpret_cast<const uint8_t*>(v_there.data());
    if (!has_values) p.v.dims = 0;
    ops::AttentionShape shape = {p.source, p.num_qo_heads, p.num_kv_heads,
                                 p.v.dims, p.causal,       p.window_left};
    shape.most_rows = ops::kGpuTileRows;
    shape.shares = shares;
    ops::AttentionWork work;
    plan_attention(shape, layout(), work);
    const DeviceWork work_there(work, (c.dims + 15) / 16 * 16);
    const DeviceBatch there(*this);
    const DeviceArray<float> out(q.size());
    const DeviceArray<float> lse(q.size() / static_cast<size_t>(c.dims));
    p.batch = there.layout;
    work_there.point(p);
    p.out = reinterpret_cast<uint8_t*>(out.data());
    p.out_stride = p.q.row_stride;
    p.lse = lse.data();
    run_on_gpu(p);
    std::vector<float> values = has_values ? out.values() : std::vector<float>();
    const std::vector<float> sums = lse.values();
    values.insert(values.end(), sums.begin(), sums.end());
    return values;
  }

  // What keys get, and by distance, one after the other.
  int64_t num_scores() const {
    return int64_t{c.heads} * c.group * std::accumulate(kv_len.begin(), kv_len.end(), 0);
  }
  std::vector<float> score_here() const {
    std::vector<float> sums(static_cast<size_t>(2 * num_scores()));
    ThreadPool pool(1);
    ops::attention_scores(c.geometry(), sequences(), here<ops::AttentionScoresInputs>(),
                          sums.data(), sums.data() + num_scores(), pool);
    return sums;
  }
  std::vector<float> score_there(Queue& queue) const {
    const DeviceArray<float> sums(static_cast<size_t>(2 * num_scores()));
    ops::attention_scores(c.geometry(), sequences(), there<ops::AttentionScoresInputs>(),
                          sums.data(), sums.data() + num_scores(), queue);
    queue.wait();
    return sums.values();
  }

  Case c;
  std::vector<float> q, k, v;
  DeviceArray<float> q_there, k_there, v_there;
};

// Of float32 sums in another order.
int far_apart(const std::vector<float>& got, const std::vector<float>& want) {
  CHECK_EQ(got.size(), want.size());
  int failures = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool near = got[i] == want[i] || std::abs(got[i] - want[i]) <= 2e-5f;
    failures += near ? 0 : 1;
  }
  return failures;
}

TEST("attention in float32 is the CPU's, however it is divided") {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  for (const Case& c : {
           Case{.kv_len = {5, 0, 70}, .rows = {1, 0, 1}},
           Case{.kv_len = {40, 300}, .rows = {9, 33}, .heads = 2},
           Case{.kv_len = {600}, .rows = {3}, .page_size = 7, .window_left = 50, .sink_tokens = 9},
           Case{.kv_len = {1100}, .rows = {2}, .window_left = 20, .sink_tokens = 300},
           Case{.kv_len = {70, 3}, .rows = {2, 3}, .group = 20, .dims = 132, .causal = false},
           Case{.kv_len = {90, 0}, .rows = {1, 1}, .page_size = 1, .dims = 256, .causal = false},
           // Tiles of 32 rows, which are walked in halves, as are the dims.
           Case{.kv_len = {300, 40}, .rows = {2, 3}, .group = 20, .dims = 272},
       }) {
    const Floats floats(c);
    const std::vector<float> want = floats.attend_here();
    CHECK_EQ(far_apart(floats.attend_there(*queue), want), 0);
    if (c.window_left >= 0) continue;
    const std::vector<float> whole = floats.attend_shares(1, true);
    CHECK_EQ(far_apart(whole, want), 0);
    CHECK(floats.attend_shares(1000, true) == whole);
    const std::vector<float> sums(whole.begin() + static_cast<int64_t>(floats.q.size()),
                                  whole.end());
    CHECK(floats.attend_shares(1000, false) == sums);
  }
}

TEST("scores of keys and of distances in float32 are the CPU's") {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  for (const Case& c : {
           Case{.kv_len = {5, 0, 70}, .rows = {1, 0, 3}},
           Case{.kv_len = {540}, .rows = {128}, .heads = 2, .group = 1, .dims = 20},
           Case{.kv_len = {300, 70}, .rows = {65, 70}, .page_size = 7, .group = 2, .dims = 40},
           Case{.kv_len = {290}, .rows = {100}, .group = 1, .dims = 300, .window_left = 30},
       }) {
    const Floats floats(c);
    const std::vector<float> sums = floats.score_there(*queue);
    CHECK_EQ(far_apart(sums, floats.score_here()), 0);
    // Blocks that add to a distance come in any order.
    CHECK(floats.score_there(*queue) == sums);
  }
}

TEST("both need each of their barriers") {
  const Floats floats({.kv_len = {300, 0, 70}, .rows = {1, 1, 20}, .group = 2, .dims = 40});
  const std::vector<float> right = floats.attend_shares(1, true);
  const std::vector<float> sums = floats.attend_shares(1, false);
  const Floats rows({.kv_len = {150}, .rows = {70}, .group = 1, .dims = 40});
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  const std::vector<float> scores = rows.score_there(*queue);
  expect_every_barrier_matters([&] {
    return floats.attend_shares(1, true) == right && floats.attend_shares(1000, true) == right &&
           floats.attend_shares(1, false) == sums && rows.score_there(*queue) == scores;
  });
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
