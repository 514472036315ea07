// Attention over the caches of callers, for the tests of the operators.
#pragma once

#include <effinfer/ops/attention.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "core/float16.h"
#include "core/float8.h"
#include "cpp/arrays.h"
#include "gpu/caller_batch.h"
#include "gpu/device_arrays.h"
#include "gpu/device_work.h"
#include "ops/attention.h"

namespace effinfer {

template <class T>
StridedView on_gpu(const DeviceArray<T>& array, DType dtype, const Dims& dims) {
  StridedView view = StridedView::dense(array.data(), dtype, dims);
  view.device = kGpu;
  return view;
}

// Sequences over NHD or HND pages of bfloat16 numbers, or of 8-bit ones that are the same.
struct Case {
  std::vector<int32_t> kv_len;
  std::vector<int32_t> rows;
  int32_t page_size = 16;
  int32_t heads = 1;
  int32_t group = 4;
  int32_t dims = 64;
  bool causal = true;
  int32_t window_left = -1;
  int32_t sink_tokens = 0;
  ops::KvOrder order = ops::KvOrder::nhd;
  DType narrow = DType::bf16;  // of which both caches have numbers

  ops::AttentionGeometry geometry() const {
    ops::AttentionGeometry g;
    g.num_qo_heads = heads * group;
    g.num_kv_heads = heads;
    g.head_dim_qk = g.head_dim_vo = dims;
    g.page_size = page_size;
    g.causal = causal;
    g.window_left = window_left;
    g.sink_tokens = sink_tokens;
    return g;
  }
};

struct Attention : CallerBatch {
  explicit Attention(const Case& given) : Attention(given, std::mt19937(7)) {}
  Attention(const Case& given, std::mt19937 random)
      : CallerBatch(given.kv_len, given.rows, given.page_size, random), c(given) {
    const int64_t numbers = int64_t{num_pages()} * c.page_size * c.heads * c.dims;
    q = as_bf16(normals(num_rows() * c.heads * c.group * c.dims, random));
    k = as_bf16(normals(numbers, random));
    v = as_bf16(normals(numbers, random));
    if (c.narrow != DType::bf16) {
      k_bytes = narrowed(k);
      v_bytes = narrowed(v);
      k_bytes_there = DeviceArray<uint8_t>(k_bytes);
      v_bytes_there = DeviceArray<uint8_t>(v_bytes);
    }
    q_there = DeviceArray<uint16_t>(q);
    k_there = DeviceArray<uint16_t>(k);
    v_there = DeviceArray<uint16_t>(v);
  }

  // Of what lies around 1, as bytes; `values` become what these are.
  std::vector<uint8_t> narrowed(std::vector<uint16_t>& values) const {
    std::vector<uint8_t> bytes;
    for (uint16_t& value : values) {
      const float x = bf16_to_f32(value);
      float kept = 0.0f;
      if (c.narrow == DType::i8) {
        bytes.push_back(
            static_cast<uint8_t>(static_cast<int8_t>(std::clamp(x * 40, -128.0f, 127.0f))));
        kept = static_cast<int8_t>(bytes.back());
      } else if (c.narrow == DType::f8_e4m3) {
        bytes.push_back(f32_to_f8_e4m3(x));
        kept = f8_e4m3_to_f32(bytes.back());
      } else {
        bytes.push_back(f32_to_f8_e5m2(x));
        kept = f8_e5m2_to_f32(bytes.back());
      }
      value = f32_to_bf16(kept);
    }
    return bytes;
  }

  StridedView cache_there(bool of_values, bool narrow) const {
    if (narrow) return on_gpu(of_values ? v_bytes_there : k_bytes_there, c.narrow, kv_dims());
    return on_gpu(of_values ? v_there : k_there, DType::bf16, kv_dims());
  }

  ops::AttentionPlan plan(const ops::AttentionLists* lists = nullptr) const {
    const ops::AttentionGeometry g = c.geometry();
    const ops::AttentionSequences sequences = {
        ints(qo_indptr), ints(kv_indptr), ints(kv_indices), ints(kv_len), {}, {}};
    if (lists != nullptr) return {g, sequences, *lists};
    return {g, sequences};
  }

  Dims q_dims() const { return {qo_indptr.back(), c.heads * c.group, c.dims}; }
  Dims kv_dims() const {
    const int64_t pages = static_cast<int64_t>(kv_indices.size());
    if (c.order == ops::KvOrder::nhd) return {pages, c.page_size, c.heads, c.dims};
    return {pages, c.heads, c.page_size, c.dims};
  }
  ops::AttentionInputs inputs(const StridedView& queries, const StridedView& keys,
                              const StridedView& values) const {
    ops::AttentionInputs in;
    in.q = queries;
    in.k = keys;
    in.v = values;
    in.order = c.order;
    in.sm_scale = 0.125f;
    return in;
  }

  std::vector<uint16_t> run_there(const ops::AttentionPlan& planned, Queue& queue,
                                  std::vector<float>* sums = nullptr, bool narrow = false) const {
    const DeviceArray<uint16_t> out(q.size());
    const DeviceArray<float> lse(q.size() / static_cast<size_t>(c.dims));
    planned.run(inputs(on_gpu(q_there, DType::bf16, q_dims()), cache_there(false, narrow),
                       cache_there(true, narrow)),
                on_gpu(out, DType::bf16, q_dims()),
                on_gpu(lse, DType::f32, {q_dims()[0], q_dims()[1]}), queue);
    queue.wait();
    if (sums != nullptr) *sums = lse.values();
    return out.values();
  }

  // The same, cut into items for so many shares.
  std::vector<uint16_t> run_shares(int32_t shares, const ops::AttentionLists* lists = nullptr,
                                   bool narrow = false) const {
    ops::AttentionShape shape;
    shape.source = ops::KeySource::rows;
    shape.num_qo_heads = c.heads * c.group;
    shape.num_kv_heads = c.heads;
    shape.head_dim = c.dims;
    shape.causal = c.causal;
    shape.window_left = c.window_left;
    shape.sink_tokens = c.sink_tokens;
    shape.most_rows = ops::kGpuTileRows;
    shape.shares = shares;
    ops::AttentionWork work;
    if (lists != nullptr) {
      plan_attention(shape, layout(), *lists, work);
    } else {
      plan_attention(shape, layout(), work);
    }
    const DeviceWork work_there(work, c.dims);
    const DeviceBatch there(*this);
    const DeviceArray<uint16_t> out(q.size());
    ops::AttentionProblem p;
    p.source = ops::KeySource::rows;
    p.num_qo_heads = c.heads * c.group;
    p.num_kv_heads = c.heads;
    p.page_size = c.page_size;
    p.causal = c.causal;
    p.window_left = c.window_left;
    p.sink_tokens = c.sink_tokens;
    p.sm_scale = 0.125f;
    p.q = {reinterpret_cast<const uint8_t*>(q_there.data()), DType::bf16, c.dims,
           int64_t{c.heads} * c.group * c.dims, c.dims};
    p.k.data = static_cast<const uint8_t*>(cache_there(false, narrow).data);
    p.k.dtype = narrow ? c.narrow : DType::bf16;
    p.k.dims = c.dims;
    p.k.head_stride = c.dims * int64_t{narrow ? 1 : 2};
    p.k.token_stride = c.heads * p.k.head_stride;
    p.k.page_stride = c.page_size * p.k.token_stride;
    p.v = p.k;
    p.v.data = static_cast<const uint8_t*>(cache_there(true, narrow).data);
    p.batch = there.layout;
    work_there.point(p);
    p.out = reinterpret_cast<uint8_t*>(out.data());
    p.out_stride = int64_t{c.heads} * c.group * c.dims;
    run_on_gpu(p);
    return out.values();
  }

  // The same by the CPU, whose tests are against float64.
  std::vector<uint16_t> run_here(const ops::AttentionPlan& planned, std::vector<float>& lse) {
    std::vector<uint16_t> out(q.size());
    lse.resize(q.size() / static_cast<size_t>(c.dims));
    ThreadPool pool(1);
    planned.run(inputs(StridedView::dense(q.data(), DType::bf16, q_dims()),
                       StridedView::dense(k.data(), DType::bf16, kv_dims()),
                       StridedView::dense(v.data(), DType::bf16, kv_dims())),
                StridedView::dense(out.data(), DType::bf16, q_dims()),
                StridedView::dense(lse.data(), DType::f32, {q_dims()[0], q_dims()[1]}), pool);
    return out;
  }

  Case c;
  std::vector<uint16_t> q, k, v;
  std::vector<uint8_t> k_bytes, v_bytes;
  DeviceArray<uint16_t> q_there, k_there, v_there;
  DeviceArray<uint8_t> k_bytes_there, v_bytes_there;
};

}  // namespace effinfer
