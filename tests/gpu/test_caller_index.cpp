// What lists of a caller's keys are chosen by: the CPU's numbers, whose tests are against float64.
#include <effinfer/ops/embedding.h>
#include <effinfer/ops/token_index.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "cpp/check.h"
#include "gpu/caller_attention.h"

namespace effinfer {
namespace {

using namespace ops;

struct Keys : CallerBatch {
  Keys(const Case& given, DType type, std::mt19937 random)
      : CallerBatch(given.kv_len, given.rows, given.page_size, random),
        c(given),
        dtype(type),
        q(as_type(normals(int64_t{num_rows()} * c.heads * c.group * c.dims, random))),
        k(as_type(normals(int64_t{num_pages()} * c.page_size * c.heads * c.dims, random))),
        q_there(q),
        k_there(k) {}

  std::vector<uint8_t> as_type(const std::vector<float>& values) const {
    std::vector<uint8_t> bytes(values.size() * static_cast<size_t>(dtype_info(dtype).block_bytes));
    for (size_t i = 0; i < values.size(); ++i) {
      if (dtype == DType::f32) std::memcpy(bytes.data() + 4 * i, &values[i], 4);
      const uint16_t half = dtype == DType::f16 ? f32_to_f16(values[i]) : f32_to_bf16(values[i]);
      if (dtype != DType::f32) std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
    return bytes;
  }
  AttentionGeometry geometry() const {
    AttentionGeometry g;
    g.num_qo_heads = c.heads * c.group;
    g.num_kv_heads = c.heads;
    g.head_dim_qk = g.head_dim_vo = c.dims;
    g.page_size = c.page_size;
    g.causal = true;
    return g;
  }
  AttentionSequences sequences() const {
    return {ints(qo_indptr), ints(kv_indptr), ints(kv_indices), ints(kv_len), {}, {}};
  }
  Dims q_dims() const { return {num_rows(), c.heads * c.group, c.dims}; }
  Dims k_dims() const { return {num_pages(), c.page_size, c.heads, c.dims}; }
  StridedView q_here() const {
    return StridedView::dense(const_cast<uint8_t*>(q.data()), dtype, q_dims());
  }
  StridedView k_here() const {
    return StridedView::dense(const_cast<uint8_t*>(k.data()), dtype, k_dims());
  }

  Case c;
  DType dtype;
  std::vector<uint8_t> q, k;
  DeviceArray<uint8_t> q_there, k_there;
};

const Case kCases[] = {
    {.kv_len = {37, 0, 90},
     .rows = {5, 0, 40},
     .page_size = 16,
     .heads = 2,
     .group = 2,
     .dims = 24},
    {.kv_len = {300}, .rows = {300}, .page_size = 7, .group = 3, .dims = 40},
};

TEST("blocks chosen by scores are the CPU's") {
  ThreadPool pool(1);
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  std::mt19937 random(5);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Case& c : kCases) {
      const Keys keys(c, dtype, random);
      for (const BlockMethod method : {BlockMethod::mean, BlockMethod::antidiagonal}) {
        IndexRows rows;
        rows.op = "test";
        rows.qo_indptr = ints(keys.qo_indptr);
        rows.kv_len = ints(keys.kv_len);
        rows.num_kv_heads = c.heads;
        rows.block_size = 16;
        BlockScoreInputs inputs;
        inputs.q = keys.q_here();
        inputs.k = keys.k_here();
        inputs.sm_scale = 0.3f;
        inputs.method = method;
        inputs.stride = 4;
        inputs.top.count = 2;
        const auto choose = [&](const Executor& executor) {
          return block_score_lists(rows, keys.geometry(), keys.sequences(), inputs, executor, pool);
        };
        const BlockLists want = choose(pool);
        inputs.q = on_gpu(keys.q_there, dtype, keys.q_dims());
        inputs.k = on_gpu(keys.k_there, dtype, keys.k_dims());
        const BlockLists got = choose(*queue);
        CHECK(got.lists == want.lists);
        CHECK(got.list_indptr == want.list_indptr);
        CHECK(got.spans == want.spans);
      }
    }
  }
}

TEST("bounds of pages are the CPU's, and what logits they allow") {
  ThreadPool pool(1);
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  std::mt19937 random(6);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Case& c : kCases) {
      const Keys keys(c, dtype, random);
      const AttentionGeometry geometry = keys.geometry();
      const AttentionSequences sequences = keys.sequences();
      const Dims dims = page_bounds_dims(geometry, sequences);
      std::vector<float> bounds(static_cast<size_t>(dims.num_elements()));
      page_bounds(geometry, sequences, keys.k_here(), KvOrder::nhd, bounds.data(), pool);
      const DeviceArray<float> bounds_there(bounds.size());
      page_bounds(geometry, sequences, on_gpu(keys.k_there, dtype, keys.k_dims()), KvOrder::nhd,
                  bounds_there.data(), *queue);
      queue->wait();
      CHECK(bounds_there.values() == bounds);
      const Dims pages = page_scores_dims(geometry, sequences);
      std::vector<float> scores(static_cast<size_t>(pages.num_elements()));
      page_scores(geometry, sequences, keys.q_here(), {bounds.data(), DType::f32, dims},
                  scores.data(), pool);
      const DeviceArray<float> scores_there(scores.size());
      page_scores(geometry, sequences, on_gpu(keys.q_there, dtype, keys.q_dims()),
                  {bounds_there.data(), DType::f32, dims, kGpu}, scores_there.data(), *queue);
      queue->wait();
      int failures = 0;
      const std::vector<float> got = scores_there.values();
      for (size_t i = 0; i < scores.size(); ++i) {
        const bool near = got[i] == scores[i] || std::abs(got[i] - scores[i]) <= 1e-4f;
        failures += near ? 0 : 1;
      }
      CHECK_EQ(failures, 0);
    }
  }
}

TEST("rows are taken as they are, of strided arrays, too") {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  std::vector<uint16_t> numbers(int64_t{9} * 5 * 24);
  std::iota(numbers.begin(), numbers.end(), uint16_t{1});
  const DeviceArray<uint16_t> there(numbers);
  const std::vector<int32_t> rows = {8, 0, 3, 3};
  for (const int64_t heads : {5, 3, 1}) {
    StridedView view = on_gpu(there, DType::f16, {9, 5, 24});
    view.dims = {9, heads, 24};
    const DeviceArray<uint16_t> out(rows.size() * static_cast<size_t>(heads) * 24);
    take_rows(view, ints(rows), out.data(), *queue);
    queue->wait();
    std::vector<uint16_t> want;
    for (const int32_t row : rows) {
      const auto first = numbers.begin() + row * 5 * 24;
      want.insert(want.end(), first, first + heads * 24);
    }
    CHECK(out.values() == want);
  }
  StridedView vast = on_gpu(there, DType::f16, {9, 5, 24});
  vast.dims = {int64_t{1} << 29, 5, 24};
  CHECK_THROWS(InvalidArgument, "x: expected at most 2^31 - 1 pieces of 48 bytes",
               take_rows(vast, ints(rows), nullptr, *queue));
  const std::vector<int32_t> wrong = {9};
  CHECK_THROWS(InvalidArgument, "rows[0]: expected a value in [0, 9)",
               take_rows(on_gpu(there, DType::f16, {9, 5, 24}), ints(wrong), nullptr, *queue));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
