// Batches of sequences of one length over bfloat16 pages, as attention has them on the device.
#pragma once

#include <numeric>
#include <random>

#include "bench/gpu/measure.h"
#include "ops/attention.h"

namespace bench {

using namespace effinfer;

struct Shape {
  int32_t batch, context, group, kv_heads, head_dim, rows;
  // Of prompts: what share of the pages that a block of rows sees it visits.
  bool prompt = false;
  double density = 1;

  int64_t sequence_pages() const { return (context + ops::kPageSize - 1) / ops::kPageSize; }
  int64_t pages() const { return batch * sequence_pages(); }
  // Of a page's keys, or of its values.
  int64_t page_bytes() const { return ops::kPageSize * kv_heads * head_dim * 2; }
  int64_t arranged_page_bytes() const {
    return static_cast<int64_t>(ops::arranged_page_bytes(head_dim));
  }
  int64_t kv_bytes() const { return int64_t{batch} * context * kv_heads * head_dim * 4; }
  int32_t qo_heads() const { return kv_heads * group; }
  int64_t q_numbers() const { return int64_t{batch} * rows * qo_heads() * head_dim; }
};

// Memory for the pages of any case.
struct Pages {
  DeviceArray<uint8_t> k, v;

  Pages(int64_t count, int64_t page_bytes) {
    const std::vector<uint16_t> numbers = random_bf16(static_cast<size_t>(page_bytes));
    k = filled(count * page_bytes, numbers.data(), page_bytes);
    v = filled(count * page_bytes, numbers.data() + page_bytes / 2, page_bytes);
  }
};

// The first `count` pages, in no order.
inline std::vector<int32_t> shuffled_pages(int64_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
  return ids;
}

// The arrays of a batch, on the host and on the device.
struct Batch {
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, kv_len;
  ops::AttentionWork work;
  std::vector<DeviceArray<int32_t>> pages;  // a table for each copy
  DeviceArray<int32_t> qo_indptr_there, kv_indptr_there, kv_len_there, done;
  DeviceArray<ops::AttentionTile> tiles;
  DeviceArray<ops::AttentionItem> items;
  DeviceArray<ops::AttentionMerge> merges;
  DeviceArray<ops::ArrangedPage> arranged;
  DeviceArray<uint8_t> arranged_pages;
  DeviceArray<float> partial_out, partial_ms;
  std::vector<uint64_t> words;  // [block of rows][KV head][page]
  DeviceArray<uint64_t> words_there;
  DeviceArray<int32_t> first_block_there;
  int32_t num_blocks = 0;
  double visited_pages = 0;  // of all blocks and KV heads, of those that they see

  Batch(const Shape& shape, int copies) {
    const std::vector<int32_t> all = shuffled_pages(copies * shape.pages());
    for (int32_t i = 0; i < shape.batch; ++i) {
      qo_indptr.push_back(qo_indptr.back() + shape.rows);
      kv_indptr.push_back(kv_indptr.back() + static_cast<int32_t>(shape.sequence_pages()));
      kv_len.push_back(shape.context);
    }
    for (int64_t i = 0; i < copies; ++i) {
      const auto first = all.begin() + i * shape.pages();
      pages.emplace_back(std::vector<int32_t>(first, first + shape.pages()));
    }
    choose_pages(shape);
    ops::AttentionShape plan;
    plan.num_qo_heads = shape.qo_heads();
    plan.num_kv_heads = shape.kv_heads;
    plan.head_dim = shape.head_dim;
    plan.visits = !words.empty();
    plan.most_rows = ops::kGpuTileRows;
    plan.shares = ops::kGpuShares;
    plan.most_partials = ops::kGpuPartials;
    if (shape.prompt) {
      plan.long_rows = ops::kGpuLongTileRows;
      plan.only_long = device_facts().arch == 90;  // Hopper's kernel of prompts
      if (plan.only_long) plan.most_arranged = ops::kGpuArrangedBytes / shape.arranged_page_bytes();
    }
    const std::vector<int32_t> ids(all.begin(), all.begin() + shape.pages());
    ops::plan_attention(plan, layout(qo_indptr.data(), kv_indptr.data(), ids.data(), kv_len.data()),
                        work);
    qo_indptr_there = DeviceArray<int32_t>(qo_indptr);
    kv_indptr_there = DeviceArray<int32_t>(kv_indptr);
    kv_len_there = DeviceArray<int32_t>(kv_len);
    tiles = DeviceArray<ops::AttentionTile>(work.tiles);
    items = DeviceArray<ops::AttentionItem>(work.items);
    merges = DeviceArray<ops::AttentionMerge>(work.merges);
    arranged = DeviceArray<ops::ArrangedPage>(work.arranged);
    arranged_pages = DeviceArray<uint8_t>(work.arranged.size() *
                                          static_cast<size_t>(shape.arranged_page_bytes()));
    done = DeviceArray<int32_t>(std::vector<int32_t>(work.merges.size() + 1));
    const auto partials = static_cast<size_t>(work.num_partials);
    partial_out = DeviceArray<float>(partials * static_cast<size_t>(shape.head_dim));
    partial_ms = DeviceArray<float>(partials * 2);
  }

  // Each block of 64 rows of a prompt and each KV head: its own pages, and others in no order.
  void choose_pages(const Shape& shape) {
    if (!shape.prompt || shape.density >= 1) return;
    std::mt19937 random(1);
    const int64_t pages_of_one = shape.sequence_pages();
    std::vector<int32_t> first;
    for (int32_t s = 0; s < shape.batch; ++s) {
      first.push_back(num_blocks);
      for (int64_t page = 0; page < pages_of_one; ++page, ++num_blocks) {
        for (int32_t head = 0; head < shape.kv_heads; ++head) choose(shape, page, random);
      }
    }
    words_there = DeviceArray<uint64_t>(words);
    first_block_there = DeviceArray<int32_t>(first);
  }

  // Of the block whose rows are the tokens of `page`.
  void choose(const Shape& shape, int64_t page, std::mt19937& random) {
    std::vector<int64_t> before(static_cast<size_t>(page));
    std::iota(before.begin(), before.end(), 0);
    std::shuffle(before.begin(), before.end(), random);
    const double count = std::round(shape.density * static_cast<double>(page + 1));
    before.resize(std::min(before.size(), static_cast<size_t>(std::max(count - 1, 0.0))));
    const size_t list = words.size();
    words.resize(list + static_cast<size_t>(shape.sequence_pages()));
    words[list + static_cast<size_t>(page)] = ~uint64_t{0};
    for (const int64_t other : before) words[list + static_cast<size_t>(other)] = ~uint64_t{0};
    // Half of a block's own page is above the diagonal.
    visited_pages += static_cast<double>(before.size()) + 0.5;
  }

  ops::BatchLayout layout(const int32_t* qo, const int32_t* kv, const int32_t* ids,
                          const int32_t* lengths) const {
    ops::BatchLayout batch;
    batch.num_tokens = qo_indptr.back();
    batch.num_sequences = static_cast<int64_t>(kv_len.size());
    batch.qo_indptr = qo;
    batch.kv_indptr = kv;
    batch.kv_indices = ids;
    batch.kv_len = lengths;
    return batch;
  }
};

inline ops::AttentionProblem problem_of(const Shape& shape, const Pages& pages,
                                        const Batch& batch) {
  ops::AttentionProblem p;
  p.num_qo_heads = shape.qo_heads();
  p.num_kv_heads = shape.kv_heads;
  ops::KvLayer layer;
  layer.dtype = DType::bf16;
  layer.num_kv_heads = shape.kv_heads;
  layer.head_dim = shape.head_dim;
  layer.k = pages.k.data();
  layer.v = pages.v.data();
  p.k = keys_of(layer);
  p.v = values_of(layer);
  p.batch = batch.layout(batch.qo_indptr_there.data(), batch.kv_indptr_there.data(), nullptr,
                         batch.kv_len_there.data());
  p.sm_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  p.arithmetic = ops::Arithmetic::bf16;
  p.decode = !shape.prompt;
  p.own_sums = batch.work.only_long;
  p.work = batch.work;
  p.work.spans = nullptr;
  p.work.tiles = batch.tiles.data();
  p.work.items = batch.items.data();
  p.work.merges = batch.merges.data();
  p.work.arranged = batch.arranged.data();
  p.arranged = batch.arranged_pages.data();
  p.partial_out = batch.partial_out.data();
  p.partial_ms = batch.partial_ms.data();
  p.done = batch.done.data();
  p.out_stride = int64_t{p.num_qo_heads} * shape.head_dim;
  if (batch.num_blocks == 0) return p;
  p.visits.num_blocks = batch.num_blocks;
  p.visits.num_kv_heads = shape.kv_heads;
  p.visits.list_words = shape.sequence_pages();
  p.visits.words = batch.words_there.data();
  p.visits.first_block = batch.first_block_there.data();
  return p;
}

}  // namespace bench
