// Decode attention over bfloat16 pages: batches of sequences of one length, each with a few rows.
#include <numeric>
#include <random>

#include "bench/gpu/measure.h"
#include "ops/attention.h"

namespace bench {
namespace {

using namespace effinfer;

struct Shape {
  int32_t batch, context, group, kv_heads, head_dim, rows;

  int64_t sequence_pages() const { return (context + ops::kPageSize - 1) / ops::kPageSize; }
  int64_t pages() const { return batch * sequence_pages(); }
  // Of a page's keys, or of its values.
  int64_t page_bytes() const { return ops::kPageSize * kv_heads * head_dim * 2; }
  int64_t kv_bytes() const { return int64_t{batch} * context * kv_heads * head_dim * 4; }
  int64_t q_numbers() const { return int64_t{batch} * rows * kv_heads * group * head_dim; }
};

// Pages of all cases.
struct Pages {
  DeviceArray<uint8_t> k, v;
  std::vector<int32_t> ids;  // in no order

  Pages(int64_t count, int64_t page_bytes) : ids(static_cast<size_t>(count)) {
    const std::vector<uint16_t> numbers = random_bf16(static_cast<size_t>(page_bytes));
    k = filled(count * page_bytes, numbers.data(), page_bytes);
    v = filled(count * page_bytes, numbers.data() + page_bytes / 2, page_bytes);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
  }
};

// The arrays of a batch, on the host and on the device.
struct Batch {
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, kv_len;
  ops::AttentionWork work;
  std::vector<DeviceArray<int32_t>> pages;  // a table for each copy
  DeviceArray<int32_t> qo_indptr_there, kv_indptr_there, kv_len_there, done;
  DeviceArray<ops::AttentionTile> tiles;
  DeviceArray<ops::AttentionItem> items;
  DeviceArray<ops::AttentionMerge> merges;
  DeviceArray<float> partial_out, partial_ms;

  Batch(const Shape& shape, const Pages& all, int copies) {
    for (int32_t i = 0; i < shape.batch; ++i) {
      qo_indptr.push_back(qo_indptr.back() + shape.rows);
      kv_indptr.push_back(kv_indptr.back() + static_cast<int32_t>(shape.sequence_pages()));
      kv_len.push_back(shape.context);
    }
    for (int64_t i = 0; i < copies; ++i) {
      const auto first = all.ids.begin() + i * shape.pages();
      pages.emplace_back(std::vector<int32_t>(first, first + shape.pages()));
    }
    ops::AttentionShape plan;
    plan.num_qo_heads = shape.kv_heads * shape.group;
    plan.num_kv_heads = shape.kv_heads;
    plan.head_dim = shape.head_dim;
    plan.most_rows = 16;
    plan.shares = ops::kGpuShares;
    const std::vector<int32_t> ids(all.ids.begin(), all.ids.begin() + shape.pages());
    ops::plan_attention(plan, layout(qo_indptr.data(), kv_indptr.data(), ids.data(), kv_len.data()),
                        work);
    qo_indptr_there = DeviceArray<int32_t>(qo_indptr);
    kv_indptr_there = DeviceArray<int32_t>(kv_indptr);
    kv_len_there = DeviceArray<int32_t>(kv_len);
    tiles = DeviceArray<ops::AttentionTile>(work.tiles);
    items = DeviceArray<ops::AttentionItem>(work.items);
    merges = DeviceArray<ops::AttentionMerge>(work.merges);
    done = DeviceArray<int32_t>(std::vector<int32_t>(work.merges.size()));
    const auto partials = static_cast<size_t>(work.num_partials);
    partial_out = DeviceArray<float>(partials * static_cast<size_t>(shape.head_dim));
    partial_ms = DeviceArray<float>(partials * 2);
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

ops::AttentionProblem problem_of(const Shape& shape, const Pages& pages, const Batch& batch) {
  ops::AttentionProblem p;
  p.num_qo_heads = shape.kv_heads * shape.group;
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
  p.decode = true;
  p.work = batch.work;
  p.work.spans = nullptr;
  p.work.tiles = batch.tiles.data();
  p.work.items = batch.items.data();
  p.work.merges = batch.merges.data();
  p.partial_out = batch.partial_out.data();
  p.partial_ms = batch.partial_ms.data();
  p.done = batch.done.data();
  p.out_stride = int64_t{p.num_qo_heads} * shape.head_dim;
  return p;
}

void run_case(const Shape& shape, const Pages& pages, const Settings& settings, Queue& queue) {
  const int copies = copies_of(shape.kv_bytes(), settings);
  const Batch batch(shape, pages, copies);
  const DeviceArray<uint16_t> q(random_bf16(static_cast<size_t>(shape.q_numbers())));
  const DeviceArray<uint16_t> out(q.size());
  ops::AttentionProblem problem = problem_of(shape, pages, batch);
  problem.q = {reinterpret_cast<const uint8_t*>(q.data()), DType::bf16, shape.head_dim,
               problem.out_stride, shape.head_dim};
  problem.out = reinterpret_cast<uint8_t*>(out.data());
  const auto& variant = ops::table<ops::AttentionProblem>().select(problem, current_target(kGpu));
  const Timing time = measure(queue, settings, copies, [&](int copy) {
    problem.batch.kv_indices = batch.pages[static_cast<size_t>(copy)].data();
    variant.launch(problem, queue);
  });
  const std::string what =
      member("section", "attention") + ", " + member("batch", shape.batch) + ", " +
      member("context", shape.context) + ", " + member("group", shape.group) + ", " +
      member("kv_heads", shape.kv_heads) + ", " + member("head_dim", shape.head_dim) + ", " +
      member("rows", shape.rows) + ", " + member("items", batch.work.items.size());
  check_results(widened(out.values()), what);
  print_row(what, time, shape.kv_bytes() + 4 * shape.q_numbers(),
            4.0 * static_cast<double>(shape.q_numbers()) * shape.context);
}

std::vector<Shape> shapes_of(Options& options) {
  std::vector<Shape> shapes;
  const auto each = [&](const char* option, const std::function<void(int32_t)>& take) {
    for (const std::string& value : split(options[option])) take(std::atoi(value.c_str()));
  };
  Shape shape{};
  shape.kv_heads = std::atoi(options["--kv-heads"].c_str());
  shape.head_dim = std::atoi(options["--head-dim"].c_str());
  each("--batches", [&](int32_t batch) {
    each("--contexts", [&](int32_t context) {
      each("--groups", [&](int32_t group) {
        each("--query-rows", [&](int32_t rows) {
          shape.batch = batch;
          shape.context = context;
          shape.group = group;
          shape.rows = rows;
          shapes.push_back(shape);
        });
      });
    });
  });
  return shapes;
}

}  // namespace

int bench_attention(Options& options, const Settings& settings, Queue& queue) {
  // A case that would leave the device less than this much of its memory is left out, aloud.
  const int64_t most_bytes = device_facts().free_bytes / 10 * 8;
  std::vector<Shape> shapes;
  int64_t most_pages = 0;
  for (const Shape& shape : shapes_of(options)) {
    const int64_t pages = copies_of(shape.kv_bytes(), settings) * shape.pages();
    if (2 * pages * shape.page_bytes() > most_bytes) {
      std::fprintf(stderr, "attention: batch %d of %d tokens does not fit the device\n",
                   shape.batch, shape.context);
      continue;
    }
    shapes.push_back(shape);
    most_pages = std::max(most_pages, pages);
  }
  if (shapes.empty()) return 0;
  const Pages pages(most_pages, shapes[0].page_bytes());
  for (const Shape& shape : shapes) run_case(shape, pages, settings, queue);
  return static_cast<int>(shapes.size());
}

}  // namespace bench
