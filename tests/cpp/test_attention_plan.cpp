// The attention plan: every visible key of every row is covered once, within the promised sizes.
// And the kernels on it: splitting a tile changes no bit, and the operand is that of the floats.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "ops/attention.h"
#include "ops/registry.h"

using namespace effinfer;
using namespace effinfer::ops;

namespace {

struct Batch {
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, kv_indices, kv_len;

  void add(int32_t length, int32_t rows) {
    qo_indptr.push_back(qo_indptr.back() + rows);
    for (int32_t i = 0; i * kPageSize < length; ++i) {
      kv_indices.push_back(static_cast<int32_t>(kv_indices.size()));
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

struct Planned {
  std::vector<AttentionWorkItem> items;
  std::vector<AttentionMergeItem> merges;
  std::vector<float> partial_out, partial_ms;
  std::vector<int32_t> done;
  AttentionPlanSize size;
  StepPlan plan;

  Planned(const AttentionShape& shape, const BatchLayout& batch, int64_t max_kv_len)
      : size(attention_plan_size(shape, batch.num_tokens, batch.num_sequences, max_kv_len)) {
    items.resize(static_cast<size_t>(size.items));
    merges.resize(static_cast<size_t>(size.merges));
    done.resize(static_cast<size_t>(size.merges));
    partial_out.resize(static_cast<size_t>(size.partials * shape.head_dim));
    partial_ms.resize(static_cast<size_t>(size.partials * 2));
    plan = plan_attention(
        shape, batch,
        {items.data(), merges.data(), partial_out.data(), partial_ms.data(), done.data()});
  }
};

// Every row of every head: its pages in order, and how its items end.
struct Coverage {
  std::vector<int32_t> pages;
  std::vector<int32_t> partials;
  int direct = 0;
};

void check_plan(const AttentionShape& shape, const Batch& batch) {
  const BatchLayout layout = batch.layout();
  const int64_t longest = *std::max_element(batch.kv_len.begin(), batch.kv_len.end());
  const Planned planned(shape, layout, longest);
  const StepPlan& plan = planned.plan;
  const int32_t group = shape.num_qo_heads / shape.num_kv_heads;
  CHECK(plan.num_items <= planned.size.items);
  CHECK(plan.num_merges <= planned.size.merges);

  std::map<std::pair<int32_t, int32_t>, Coverage> rows;
  std::set<int32_t> used;
  for (int64_t i = 0; i < plan.num_items; ++i) {
    const AttentionWorkItem& item = plan.items[i];
    CHECK(item.num_rows * group <= std::max<int64_t>(kAttentionTileRows, group));
    const int32_t end = item.first_page + item.num_pages;
    for (int32_t r = 0; r < item.num_rows; ++r) {
      const int32_t row = item.first_row + r;
      CHECK(row >= batch.qo_indptr[static_cast<size_t>(item.sequence)]);
      CHECK(row < batch.qo_indptr[static_cast<size_t>(item.sequence) + 1]);
      Coverage& coverage = rows[{row, item.kv_head}];
      for (int32_t page = item.first_page; page < end; ++page) coverage.pages.push_back(page);
      if (item.partial < 0) {
        ++coverage.direct;
        continue;
      }
      const int64_t chunk_pages = kKvChunk / kPageSize;
      CHECK_EQ(item.first_page / chunk_pages, (end - 1) / chunk_pages);
      coverage.partials.push_back(item.partial + r * group);
      for (int32_t head = 0; head < group; ++head) {
        const int32_t index = item.partial + r * group + head;
        CHECK(index < planned.size.partials);
        CHECK(used.insert(index).second);
      }
    }
  }
  std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>> merged;
  for (int64_t i = 0; i < plan.num_merges; ++i) {
    const AttentionMergeItem& merge = plan.merges[i];
    std::vector<int32_t>& list = merged[{merge.row, merge.kv_head}];
    CHECK(list.empty());
    for (int32_t c = 0; c < merge.num_partials; ++c) {
      list.push_back(merge.first_partial + c * merge.stride);
    }
  }
  CHECK_EQ(rows.size(), static_cast<size_t>(layout.num_tokens * shape.num_kv_heads));
  for (size_t s = 0; s < batch.kv_len.size(); ++s) {
    for (int32_t row = batch.qo_indptr[s]; row < batch.qo_indptr[s + 1]; ++row) {
      const int32_t position = batch.kv_len[s] - (batch.qo_indptr[s + 1] - row);
      const int32_t first = shape.window_left < 0 ? 0 : std::max(0, position - shape.window_left);
      for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
        const Coverage& coverage = rows[{row, head}];
        CHECK(!coverage.pages.empty() && coverage.pages.front() <= first / kPageSize);
        CHECK(!coverage.pages.empty() && coverage.pages.back() >= position / kPageSize);
        for (size_t i = 1; i < coverage.pages.size(); ++i) {
          CHECK_EQ(coverage.pages[i], coverage.pages[i - 1] + 1);
        }
        CHECK_EQ(coverage.direct, coverage.partials.empty() ? 1 : 0);
        CHECK(coverage.partials == (merged[{row, head}]));
      }
    }
  }
}

// A cache of random bf16 bits that are finite numbers.
struct Cache {
  std::vector<uint16_t> k, v;
  KvLayer layer;

  Cache(int32_t pages, int32_t heads, int32_t dim, std::mt19937& random) {
    const size_t size = static_cast<size_t>(pages * heads * dim) * kPageSize;
    for (std::vector<uint16_t>* values : {&k, &v}) {
      values->resize(size);
      for (uint16_t& value : *values) {
        value = static_cast<uint16_t>(0x3e00 + random() % 0x180 + (random() % 2 << 15));
      }
    }
    layer = {DType::bf16,
             heads,
             dim,
             pages,
             reinterpret_cast<uint8_t*>(k.data()),
             reinterpret_cast<uint8_t*>(v.data()),
             nullptr,
             nullptr};
  }
};

TEST("plans cover what rows see") {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int32_t kv_heads = 1 + static_cast<int32_t>(random() % 5);
    const int32_t groups[] = {1, 2, 3, 5, 9, 64};
    AttentionShape shape{kv_heads * groups[random() % 6], kv_heads, 64, -1};
    if (random() % 2 == 0) shape.window_left = static_cast<int32_t>(random() % 700);
    Batch batch;
    const int count = 1 + static_cast<int>(random() % 6);
    for (int i = 0; i < count; ++i) {
      const auto length = static_cast<int32_t>(1 + random() % (random() % 4 == 0 ? 9000 : 300));
      batch.add(length, 1 + static_cast<int32_t>(random() % std::min(length, 70)));
    }
    check_plan(shape, batch);
  }
}

TEST("one long sequence is split for a team, equal ones among many are not") {
  const AttentionShape shape{9, 3, 64, -1};
  Batch one;
  one.add(4096, 1);
  CHECK_EQ(Planned(shape, one.layout(), 4096).plan.num_items, 3 * 4096 / kKvChunk);
  Batch many;
  for (int i = 0; i < 64; ++i) many.add(4096, 1);
  CHECK_EQ(Planned(shape, many.layout(), 4096).plan.num_items, 3 * 64);
  many.add(40000, 1);
  CHECK(Planned(shape, many.layout(), 40000).plan.num_merges == 3);
}

TEST("an empty batch has an empty plan") {
  const AttentionShape shape{9, 3, 64, -1};
  Batch batch;
  CHECK_EQ(Planned(shape, batch.layout(), 0).plan.num_items, 0);
  batch.add(100, 0);
  CHECK_EQ(Planned(shape, batch.layout(), 100).plan.num_items, 0);
}

// Splits and stores through the plan, against unsplit items and a conversion of whole rows.
void check_split(const AttentionShape& shape, Isa isa) {
  std::mt19937 random(2);
  Batch batch;
  batch.add(1000, 3);
  batch.add(700, 1);
  batch.add(100, 2);
  const BatchLayout layout = batch.layout();
  const int64_t cols = shape.num_qo_heads * shape.head_dim;
  Cache cache(static_cast<int32_t>(batch.kv_indices.size()), shape.num_kv_heads, shape.head_dim,
              random);
  std::vector<float> q(static_cast<size_t>(layout.num_tokens * cols));
  for (float& value : q) value = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
  std::vector<AttentionWorkItem> whole;
  for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
    whole.push_back({0, head, 0, 3, 0, 16, -1, 0});
    whole.push_back({1, head, 3, 1, 0, 11, -1, 0});
    whole.push_back({2, head, 4, 2, 0, 2, -1, 0});
  }
  ThreadPool pool(2);
  Planned planned(shape, layout, 1000);
  CHECK_EQ(planned.plan.num_merges, 4 * shape.num_kv_heads);
  std::vector<float> split(q.size()), direct(q.size());
  AttentionProblem problem;
  problem.q = q.data();
  problem.q_stride = problem.out_stride = cols;
  problem.num_qo_heads = shape.num_qo_heads;
  problem.kv = cache.layer;
  problem.batch = layout;
  problem.plan = planned.plan;
  problem.sm_scale = 0.2f;
  problem.out = split.data();
  run_alone(problem, pool);
  for (const Arithmetic arithmetic : {Arithmetic::int8, Arithmetic::bf16, Arithmetic::f32}) {
    Operand act{arithmetic, layout.num_tokens, cols, nullptr};
    const size_t bytes = static_cast<size_t>(act.row_bytes() * layout.num_tokens);
    std::vector<uint8_t> got(bytes + 64), expected(bytes + 64);
    const auto aligned = [](std::vector<uint8_t>& v) {
      return v.data() + (64 - reinterpret_cast<uintptr_t>(v.data()) % 64);
    };
    act.data = aligned(got);
    problem.out_operand = act;
    run_alone(problem, pool);
    act.data = aligned(expected);
    for (int64_t row = 0; row < layout.num_tokens; ++row) {
      store_operand_row(isa)(act, row, split.data() + row * cols);
    }
    CHECK(std::memcmp(aligned(got), aligned(expected), bytes) == 0);
  }
  problem.out_operand = {};
  problem.plan.items = whole.data();
  problem.plan.num_items = static_cast<int64_t>(whole.size());
  problem.plan.num_merges = 0;
  problem.out = direct.data();
  run_alone(problem, pool);
  CHECK(split == direct);
}

}  // namespace

TEST("split or not, as floats or as an operand: the same bits") {
  for (const Isa isa : available_isas()) {
    set_isa(isa);
    check_split({4, 2, 48, -1}, isa);  // heads share blocks of the operand
    check_split({9, 3, 64, -1}, isa);  // each head has its own
    check_split({5, 5, 32, -1}, isa);  // the operand has padding
  }
}

CHECK_MAIN()
