// The public operators over a queue, as who embeds the library calls them.
#include <effinfer/error.h>
#include <effinfer/executor.h>
#include <effinfer/ops/attention.h>
#include <effinfer/ops/attention_scores.h>
#include <effinfer/ops/norm.h>
#include <effinfer/ops/page.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "core/float16.h"
#include "cpp/arrays.h"
#include "cpp/check.h"
#include "gpu/caller_attention.h"
#include "gpu/device_arrays.h"
#include "gpu/mutations.h"
#include "ops/attention.h"

namespace effinfer {
namespace {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST("an operator runs on a pool or in a queue") {
  std::mt19937 random(1);
  constexpr int64_t kRows = 5, kCols = 48;
  const std::vector<float> x = normals(kRows * kCols, random);
  const std::vector<float> weight = normals(kCols, random);
  const Dims dims = {kRows, kCols};
  std::vector<float> expected(x.size());
  ThreadPool pool(1);
  auto* from = const_cast<float*>(x.data());
  ops::rmsnorm(StridedView::dense(from, DType::f32, dims), {weight.data(), DType::f32, {kCols}}, {},
               StridedView::dense(expected.data(), DType::f32, dims), pool);

  const DeviceArray<float> x_there(x);
  const DeviceArray<float> weight_there(weight);
  const DeviceArray<float> out_there(x.size());
  const TensorView weights = {weight_there.data(), DType::f32, {kCols}, kGpu};
  const std::unique_ptr<Queue> queue = wrap_stream(kGpu, nullptr);
  ops::rmsnorm(on_gpu(x_there, DType::f32, dims), weights, {}, on_gpu(out_there, DType::f32, dims),
               *queue);
  queue->wait();
  const std::vector<float> out = out_there.values();
  for (size_t i = 0; i < out.size(); ++i) CHECK(std::abs(out[i] - expected[i]) < 1e-5f);

  const std::string mixed = message_of([&] {
    ops::rmsnorm(on_gpu(x_there, DType::f32, dims), {weight.data(), DType::f32, {kCols}}, {},
                 on_gpu(out_there, DType::f32, dims), *queue);
  });
  CHECK_EQ(mixed, "[rmsnorm] weight: expected a tensor on cuda:0, got one on cpu");
  const std::string elsewhere = message_of([&] {
    ops::rmsnorm(on_gpu(x_there, DType::f32, dims), weights, {},
                 on_gpu(out_there, DType::f32, dims), pool);
  });
  CHECK_EQ(elsewhere, "[rmsnorm] input: expected a tensor on cpu, got one on cuda:0");
}

TEST("scores of keys on a GPU are refused by name") {
  const DeviceArray<float> there(2 * 16);
  std::vector<float> here(2 * 16), out(2);
  const std::vector<int32_t> starts = {0, 2};
  const std::vector<int32_t> lengths = {2};
  ops::AttentionGeometry geometry;
  geometry.num_qo_heads = geometry.num_kv_heads = 1;
  geometry.head_dim_qk = geometry.head_dim_vo = 16;
  ops::AttentionSequences sequences;
  sequences.qo_indptr = sequences.kv_indptr = {starts.data(), DType::i32, {2}};
  sequences.kv_len = {lengths.data(), DType::i32, {1}};
  const StridedView on_cpu = StridedView::dense(here.data(), DType::f32, {2, 1, 16});
  const StridedView on_device = on_gpu(there, DType::f32, {2, 1, 16});
  ThreadPool pool(1);
  const auto refusal = [&](const StridedView& q, const StridedView& k) {
    ops::AttentionScoresInputs inputs;
    inputs.q = q;
    inputs.k = k;
    return message_of(
        [&] { ops::attention_scores(geometry, sequences, inputs, out.data(), nullptr, pool); });
  };
  CHECK_EQ(refusal(on_cpu, on_cpu), "");
  CHECK_EQ(refusal(on_device, on_cpu),
           "[attention_scores] q: expected a tensor on cpu, got one on cuda:0");
  CHECK_EQ(refusal(on_cpu, on_device),
           "[attention_scores] k: expected a tensor on cpu, got one on cuda:0");
}

TEST("queues over a stream share it, and others follow") {
  void* const stream = reinterpret_cast<void*>(uintptr_t{2});  // cudaStreamPerThread
  const std::unique_ptr<Queue> first = wrap_stream(kGpu, stream);
  const std::unique_ptr<Queue> same = wrap_stream(kGpu, stream);
  const std::unique_ptr<Queue> other = make_queue(kGpu);
  CHECK(first->stream() == same->stream());
  CHECK(first->stream() != other->stream());
  const std::vector<int32_t> values = {1, 2, 3};
  std::vector<int32_t> back(3);
  const std::shared_ptr<void> memory = first->allocate(12);
  first->upload(memory.get(), values.data(), 12);
  other->follow(*same);
  other->download(back.data(), memory.get(), 12);
  other->wait();
  CHECK(back == values);
  CHECK(!message_of([] { wrap_stream({}, nullptr); }).empty());
  CHECK(!message_of([] { allocate_memory({DeviceKind::cuda, 9}, 1); }).empty());
}

TEST("attention over a caller's pages, as on the CPU") {
  for (const Case& c : {
           Case{.kv_len = {5, 0, 70}, .rows = {1, 0, 1}},
           Case{.kv_len = {40, 300}, .rows = {9, 33}, .heads = 2, .order = ops::KvOrder::hnd},
           Case{.kv_len = {600}, .rows = {3}, .page_size = 7, .window_left = 50, .sink_tokens = 9},
           Case{.kv_len = {1100}, .rows = {2}, .window_left = 20, .sink_tokens = 300},
           Case{.kv_len = {70, 3}, .rows = {2, 3}, .group = 20, .dims = 128, .causal = false},
           Case{.kv_len = {90, 0}, .rows = {1, 1}, .page_size = 1, .dims = 200, .causal = false},
       }) {
    Attention attention(c);
    const ops::AttentionPlan plan = attention.plan();
    const std::unique_ptr<Queue> queue = make_queue(kGpu);
    std::vector<float> expected_lse, lse;
    const std::vector<uint16_t> expected = attention.run_here(plan, expected_lse);
    const std::vector<uint16_t> out = attention.run_there(plan, *queue, &lse);
    int failures = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      const float want = bf16_to_f32(expected[i]);
      // Both round, and the GPU its weights, too.
      const bool near = std::abs(bf16_to_f32(out[i]) - want) <= 0.02f + std::abs(want) * 0x1p-7f;
      failures += near ? 0 : 1;
    }
    for (size_t i = 0; i < lse.size(); ++i) {
      const bool near = lse[i] == expected_lse[i] || std::abs(lse[i] - expected_lse[i]) < 1e-3f;
      failures += near ? 0 : 1;
    }
    CHECK_EQ(failures, 0);
    // Lists are there already.
    CHECK(attention.run_there(plan, *queue) == out);
  }
}

TEST("a row's bits do not depend on how its keys are shared by blocks") {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  for (const Case& c : {
           Case{.kv_len = {1000, 70}, .rows = {1, 2}},
           Case{.kv_len = {1300}, .rows = {2}, .window_left = 20, .sink_tokens = 300},
           Case{.kv_len = {600}, .rows = {1}, .dims = 256},
       }) {
    const Attention attention(c);
    const std::vector<uint16_t> split = attention.run_there(attention.plan(), *queue);
    CHECK(attention.run_shares(1) == split);
    CHECK(attention.run_shares(2) == split);
  }
}

TEST("a recording of attention runs the plan that was put there last") {
  // The longest sequence of one plan is cut for many blocks, where another plan needs few.
  const Case cases[] = {{.kv_len = {70, 5, 1}, .rows = {1, 1, 1}},
                        {.kv_len = {1, 2400, 300}, .rows = {1, 1, 1}},
                        {.kv_len = {0, 33, 64}, .rows = {1, 1, 1}},
                        {.kv_len = {900, 0, 1500}, .rows = {1, 1, 1}}};
  const Attention largest({.kv_len = {2400, 300, 70}, .rows = {1, 1, 1}});
  const DeviceArray<uint16_t> out(largest.q.size());
  const DeviceArray<uint16_t> q(largest.q.size());
  const auto size = [](const DeviceArray<uint16_t>& x) { return x.size() * sizeof(uint16_t); };
  const DeviceArray<uint16_t> k(largest.k.size()), v(largest.k.size());
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  ops::FixedPlans memory(static_cast<int64_t>(largest.kv_indices.size()), 0);
  std::vector<ops::AttentionPlan> plans;
  std::unique_ptr<Recording> recording;
  for (const Case& c : cases) {
    const Attention attention(c);
    const std::vector<uint16_t> expected = attention.run_there(attention.plan(), *queue);
    queue->upload(q.data(), attention.q.data(), attention.q.size() * sizeof(uint16_t));
    queue->upload(k.data(), attention.k.data(), attention.k.size() * sizeof(uint16_t));
    queue->upload(v.data(), attention.v.data(), attention.v.size() * sizeof(uint16_t));
    plans.push_back(attention.plan());
    plans.back().put(memory, *queue);
    const auto run = [&](const ops::AttentionPlan& plan) {
      plan.run(attention.inputs(on_gpu(q, DType::bf16, attention.q_dims()),
                                on_gpu(k, DType::bf16, largest.kv_dims()),
                                on_gpu(v, DType::bf16, largest.kv_dims())),
               on_gpu(out, DType::bf16, attention.q_dims()), {}, *queue);
    };
    queue->zero(out.data(), size(out));
    if (recording == nullptr) {
      run(plans.back());
      queue->wait();
      recording = queue->record([&] { run(plans.back()); });
      CHECK(out.values() == expected);
      queue->zero(out.data(), size(out));
    }
    for (int again = 0; again < 2; ++again) queue->replay(*recording);
    queue->wait();
    CHECK(out.values() == expected);
    // A plan that has lost its place runs by itself.
    queue->zero(out.data(), size(out));
    run(plans.back());
    queue->wait();
    CHECK(out.values() == expected);
  }
  const Attention more({.kv_len = {2400, 300, 70, 1}, .rows = {1, 1, 1, 1}});
  const auto refusal = [&](const Attention& attention) {
    ops::AttentionPlan plan = attention.plan();
    return message_of([&] { plan.put(memory, *queue); });
  };
  CHECK(refusal(more).find("kv_indices: expected at most") != std::string::npos);
  CHECK(refusal(Attention({.kv_len = {1, 1}, .rows = {1, 1}})).find("3 sequences") !=
        std::string::npos);
  CHECK(refusal(Attention({.kv_len = {9, 9, 9}, .rows = {2, 1, 1}})).find("at most 3") !=
        std::string::npos);
  CHECK(refusal(Attention({.kv_len = {9, 9, 9}, .rows = {1, 1, 1}, .group = 8})).find("geometry") !=
        std::string::npos);
}

TEST("attention needs each of its barriers") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("races are not detected in this build");
  }
  for (const int32_t dims : {64, 256}) {
    const Attention attention({.kv_len = {600, 70}, .rows = {1, 2}, .group = 2, .dims = dims});
    const std::vector<uint16_t> right = attention.run_shares(1);
    expect_every_barrier_matters(
        [&] { return attention.run_shares(1) == right && attention.run_shares(1000) == right; });
  }
}

TEST("lists of spans need each of the barriers, too") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("races are not detected in this build");
  }
  Attention attention({.kv_len = {600}, .rows = {9}, .group = 2});
  const std::vector<int32_t> lists = {0, 0, 0, 5, 0, 0, 5, 4};
  const std::vector<int32_t> indptr = {0, 3, 4}, spans = {3, 90, 200, 201, 300, 560, 77, 596};
  const auto matrix = [](const std::vector<int32_t>& values, int64_t cols) {
    return TensorView{
        values.data(), DType::i32, {static_cast<int64_t>(values.size()) / cols, cols}};
  };
  const ops::AttentionLists given = {matrix(lists, 4), ints(indptr), matrix(spans, 2), {}, 0};
  const ops::AttentionPlan plan = attention.plan(&given);
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  std::vector<float> lse;
  const std::vector<uint16_t> expected = attention.run_here(plan, lse);
  const std::vector<uint16_t> right = attention.run_there(plan, *queue);
  for (size_t i = 0; i < right.size(); ++i) {
    CHECK(std::abs(bf16_to_f32(right[i]) - bf16_to_f32(expected[i])) <= 0.02f);
  }
  expect_every_barrier_matters([&] {
    return attention.run_shares(1, &given) == right && attention.run_shares(1000, &given) == right;
  });
}

TEST("rows go to the pages of a caller's cache, converted where dtypes differ") {
  constexpr int64_t kRows = 6, kHeads = 2, kDims = 24, kPages = 4, kPageSize = 4;
  std::mt19937 random(3);
  const std::vector<float> rows = normals(kRows * kHeads * kDims, random);
  const std::vector<int32_t> sequences = {0, 0, 1, 1, -1, 1}, positions = {3, 4, 0, 1, 0, 2};
  const std::vector<int32_t> indices = {2, 0, 3}, indptr = {0, 2, 3}, last = {1, 3};
  const DeviceArray<int32_t> sequences_there(sequences), positions_there(positions);
  const DeviceArray<int32_t> indices_there(indices), indptr_there(indptr), last_there(last);
  const auto list = [](const DeviceArray<int32_t>& array) {
    return TensorView{array.data(), DType::i32, {static_cast<int64_t>(array.size())}, kGpu};
  };
  const DeviceArray<float> rows_there(rows);
  const size_t size = kPages * kPageSize * kHeads * kDims;
  const DeviceArray<uint16_t> k_cache(std::vector<uint16_t>(size, 0x7fff));
  const DeviceArray<float> v_cache(std::vector<float>(size, 7.0f));
  const StridedView given = on_gpu(rows_there, DType::f32, {kRows, kHeads, kDims});
  const Dims cache = {kPages, kPageSize, kHeads, kDims};
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  ops::append_paged_kv_cache({given, on_gpu(k_cache, DType::bf16, cache)},
                             {given, on_gpu(v_cache, DType::f32, cache)},
                             {list(sequences_there), list(positions_there), list(indices_there),
                              list(indptr_there), list(last_there)},
                             ops::KvOrder::nhd, *queue);
  queue->wait();
  std::vector<uint16_t> k(size, 0x7fff);
  std::vector<float> v(size, 7.0f);
  for (size_t row = 0; row < kRows; ++row) {
    if (sequences[row] < 0) continue;
    const auto entry = static_cast<size_t>(indptr[static_cast<size_t>(sequences[row])] +
                                           positions[row] / static_cast<int32_t>(kPageSize));
    const size_t slot = static_cast<size_t>(indices[entry]) * kPageSize +
                        static_cast<size_t>(positions[row]) % kPageSize;
    for (size_t i = 0; i < kHeads * kDims; ++i) {
      k[slot * kHeads * kDims + i] = f32_to_bf16(rows[row * kHeads * kDims + i]);
      v[slot * kHeads * kDims + i] = rows[row * kHeads * kDims + i];
    }
  }
  CHECK(k_cache.values() == k);
  CHECK(v_cache.values() == v);
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
