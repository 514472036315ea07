// The work of attention: every visible key of every row is covered once, within the reserved sizes.
// And the kernels on it: splitting a tile changes no bit, and the operand is that of the floats.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "cpu/operand.h"
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

// Planned without growing what was reserved.
struct Planned {
  AttentionWork work;
  std::vector<float> partial_out, partial_ms;
  std::vector<int32_t> done;

  Planned(const AttentionShape& shape, const BatchLayout& batch, int64_t max_kv_len) {
    const int64_t partials = work.reserve(shape, batch.num_tokens, batch.num_sequences, max_kv_len);
    const AttentionTile* tiles = work.tiles.data();
    const AttentionItem* items = work.items.data();
    const AttentionMerge* merges = work.merges.data();
    const ArrangedPage* arranged = work.arranged.data();
    plan_attention(shape, batch, work);
    CHECK(work.arranged.data() == arranged);
    CHECK(work.tiles.data() == tiles);
    CHECK(work.items.data() == items);
    CHECK(work.merges.data() == merges);
    CHECK(work.num_partials <= partials);
    done.resize(work.merges.capacity());
    partial_out.resize(static_cast<size_t>(partials * shape.head_dim));
    partial_ms.resize(static_cast<size_t>(partials * 2));
  }
};

// Every row of every head: its units in order, and how its items end.
struct Coverage {
  std::vector<int32_t> units;
  std::vector<int32_t> partials;
  int direct = 0;
};

using Row = std::pair<int32_t, int32_t>;  // row, query head

void add_item(const AttentionWork& work, const AttentionItem& item, std::map<Row, Coverage>& rows,
              std::set<int32_t>& used) {
  const AttentionTile& tile = work.tiles[static_cast<size_t>(item.tile)];
  const int32_t first_chunk = item.first_unit / kChunkUnits;
  const int32_t chunks = (item.end_unit - 1) / kChunkUnits - first_chunk + 1;
  for (int32_t r = 0; r < tile.num_rows; ++r) {
    for (int32_t h = 0; h < tile.num_heads; ++h) {
      Coverage& coverage = rows[{tile.first_row + r, tile.first_head + h}];
      for (int32_t unit = item.first_unit; unit < item.end_unit; ++unit) {
        const bool hidden = unit >= tile.sink_units && unit < tile.first_unit;
        if (!hidden) coverage.units.push_back(unit);
      }
      coverage.direct += item.partial < 0 ? 1 : 0;
      for (int32_t c = 0; item.partial >= 0 && c < chunks; ++c) {
        const int32_t index = item.partial + (c * tile.num_rows + r) * tile.num_heads + h;
        coverage.partials.push_back(index);
        CHECK(used.insert(index).second);
        CHECK(index < work.num_partials);
      }
    }
  }
}

// The partial results that a row's merge adds up.
std::map<Row, std::vector<int32_t>> merged_partials(const AttentionWork& work) {
  std::map<Row, std::vector<int32_t>> merged;
  for (const AttentionMerge& merge : work.merges) {
    const AttentionTile& tile = work.tiles[static_cast<size_t>(merge.tile)];
    for (int32_t r = 0; r < tile.num_rows; ++r) {
      for (int32_t h = 0; h < tile.num_heads; ++h) {
        std::vector<int32_t>& list = merged[{tile.first_row + r, tile.first_head + h}];
        CHECK(list.empty());
        for (int32_t c = 0; c < merge.num_partials; ++c) {
          list.push_back(merge.first_partial + (c * tile.num_rows + r) * tile.num_heads + h);
        }
      }
    }
  }
  return merged;
}

// The units that hold keys which a row at `position` sees.
std::set<int32_t> needed_units(const AttentionShape& shape, int32_t position) {
  std::set<int32_t> needed;
  for (int32_t key = 0; key <= position; ++key) {
    const bool in_window = shape.window_left < 0 || key >= position - shape.window_left;
    if (in_window || key < shape.sink_tokens) needed.insert(key / kUnitTokens);
  }
  return needed;
}

void check_plan(const AttentionShape& shape, const Batch& batch) {
  const BatchLayout layout = batch.layout();
  const int64_t longest = *std::max_element(batch.kv_len.begin(), batch.kv_len.end());
  const Planned planned(shape, layout, longest);
  const AttentionWork& work = planned.work;
  std::map<Row, Coverage> rows;
  std::set<int32_t> used;
  for (const AttentionTile& tile : work.tiles) {
    CHECK(tile.num_rows * tile.num_heads <= work.tile_rows);
    CHECK(tile.first_row >= batch.qo_indptr[static_cast<size_t>(tile.sequence)]);
    CHECK(tile.first_row + tile.num_rows <=
          batch.qo_indptr[static_cast<size_t>(tile.sequence) + 1]);
    if (shape.chunk == 0) continue;
    const int32_t position = layout.step_begin(tile.sequence) + tile.list_row;
    CHECK_EQ(position / shape.chunk, (position + tile.num_rows - 1) / shape.chunk);
  }
  std::vector<int32_t> items_of(work.merges.size());
  for (const AttentionItem& item : work.items) {
    add_item(work, item, rows, used);
    CHECK_EQ(item.merge >= 0, item.partial >= 0);
    if (item.merge >= 0) ++items_of[static_cast<size_t>(item.merge)];
  }
  for (size_t i = 0; i < items_of.size(); ++i) CHECK_EQ(items_of[i], work.merges[i].num_items);
  const auto merged = merged_partials(work);
  CHECK_EQ(rows.size(), static_cast<size_t>(layout.num_tokens * shape.num_qo_heads));
  for (size_t s = 0; s < batch.kv_len.size(); ++s) {
    for (int32_t row = batch.qo_indptr[s]; row < batch.qo_indptr[s + 1]; ++row) {
      const int32_t position = batch.kv_len[s] - (batch.qo_indptr[s + 1] - row);
      const std::set<int32_t> needed = needed_units(shape, position);
      for (int32_t head = 0; head < shape.num_qo_heads; ++head) {
        Coverage& coverage = rows[{row, head}];
        std::sort(coverage.units.begin(), coverage.units.end());
        std::sort(coverage.partials.begin(), coverage.partials.end());
        CHECK(std::adjacent_find(coverage.units.begin(), coverage.units.end()) ==
              coverage.units.end());
        CHECK(std::includes(coverage.units.begin(), coverage.units.end(), needed.begin(),
                            needed.end()));
        CHECK_EQ(coverage.direct, coverage.partials.empty() ? 1 : 0);
        const auto entry = merged.find({row, head});
        CHECK(coverage.partials ==
              (entry == merged.end() ? std::vector<int32_t>() : entry->second));
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
             nullptr,
             {}};
  }
};

AttentionShape make_shape(int32_t heads, int32_t kv_heads, int32_t head_dim) {
  AttentionShape shape;
  shape.num_qo_heads = heads;
  shape.num_kv_heads = kv_heads;
  shape.head_dim = head_dim;
  return shape;
}

TEST("plans cover what rows see") {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int32_t kv_heads = 1 + static_cast<int32_t>(random() % 5);
    const int32_t groups[] = {1, 2, 3, 5, 9, 64};
    AttentionShape shape = make_shape(kv_heads * groups[random() % 6], kv_heads, 64);
    if (random() % 3 == 0) shape.source = KeySource::rows;
    if (random() % 2 == 0) shape.window_left = static_cast<int32_t>(random() % 700);
    if (random() % 2 == 0) shape.sink_tokens = static_cast<int32_t>(random() % 300);
    if (random() % 2 == 0) shape.chunk = kChunkTokens * static_cast<int32_t>(1 + random() % 3);
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
  const AttentionShape shape = make_shape(9, 3, 64);
  Batch one;
  one.add(4096, 1);
  CHECK_EQ(Planned(shape, one.layout(), 4096).work.items.size(), size_t{3 * 16});
  Batch many;
  for (int i = 0; i < 64; ++i) many.add(4096, 1);
  CHECK_EQ(Planned(shape, many.layout(), 4096).work.items.size(), size_t{3 * 64});
  many.add(40000, 1);
  CHECK_EQ(Planned(shape, many.layout(), 40000).work.merges.size(), size_t{3});
}

TEST("generated rows with lists of their own are tiles of their own") {
  std::mt19937 random(3);
  AttentionShape shape = make_shape(6, 2, 64);
  shape.visits = shape.row_visits = true;
  for (int round = 0; round < 50; ++round) {
    Batch batch;
    for (int i = 0; i < 4; ++i) {
      const auto length = static_cast<int32_t>(1 + random() % 3000);
      batch.add(length, 1 + static_cast<int32_t>(random() % std::min(length, 100)));
    }
    check_plan(shape, batch);
    const Planned planned(shape, batch.layout(), 3000);
    for (const AttentionTile& tile : planned.work.tiles) {
      const auto s = static_cast<size_t>(tile.sequence);
      const int32_t rows = batch.qo_indptr[s + 1] - batch.qo_indptr[s];
      CHECK(rows >= kSparseRows || tile.num_rows == 1);
    }
  }
}

// Of the tiles whose pages are re-arranged every page that they visit is, at the place that they
// say, and none that no tile visits but those between a sequence's sinks and windows.
size_t check_arranged(const AttentionShape& shape, const Batch& batch) {
  const int64_t longest = *std::max_element(batch.kv_len.begin(), batch.kv_len.end());
  const Planned planned(shape, batch.layout(), longest);
  const std::vector<ArrangedPage>& pages = planned.work.arranged;
  CHECK(static_cast<int64_t>(pages.size()) <= shape.most_arranged);
  std::set<size_t> used;
  for (const AttentionTile& tile : planned.work.tiles) {
    if (tile.arranged == kNotArranged) continue;
    for (int32_t unit = 0; unit < tile.end_unit; ++unit) {
      if (unit >= tile.sink_units && unit < tile.first_unit) continue;
      const auto at = static_cast<size_t>(tile.arranged + unit);
      CHECK(at < pages.size());
      if (at >= pages.size()) continue;
      CHECK_EQ(pages[at].sequence, tile.sequence);
      CHECK_EQ(pages[at].kv_head, tile.kv_head);
      CHECK_EQ(pages[at].unit, unit);
      used.insert(at);
    }
  }
  if (shape.sink_tokens == 0) CHECK_EQ(used.size(), pages.size());
  return pages.size();
}

TEST("pages that many tiles read are re-arranged, as long as there is room") {
  AttentionShape shape = make_shape(8, 2, 128);
  shape.most_rows = kGpuTileRows;
  shape.long_rows = kGpuLongTileRows;
  shape.only_long = true;
  Batch batch;
  batch.add(2048, 2048);
  batch.add(2048, 64);  // two tiles
  batch.add(600, 600);
  CHECK_EQ(check_arranged(shape, batch), size_t{0});
  shape.most_arranged = 1000;
  CHECK_EQ(check_arranged(shape, batch), size_t{2 * 32 + 2 * 10});
  shape.most_arranged = 60;  // a head of the first one
  CHECK_EQ(check_arranged(shape, batch), size_t{32 + 2 * 10});
  shape.most_arranged = 1000;
  shape.visits = true;  // of a quarter of the pages
  CHECK_EQ(check_arranged(shape, batch), size_t{2 * 32});
  shape.visits = false;
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    shape.window_left = static_cast<int32_t>(random() % 700);
    shape.sink_tokens = random() % 2 == 0 ? 0 : static_cast<int32_t>(random() % 300);
    shape.arranged_reads = static_cast<int64_t>(random() % 4);
    Batch any;
    for (int i = 0; i < 4; ++i) {
      const auto length = static_cast<int32_t>(1 + random() % 3000);
      any.add(length, 1 + static_cast<int32_t>(random() % static_cast<uint32_t>(length)));
    }
    check_arranged(shape, any);
  }
}

TEST("an empty batch has no work") {
  const AttentionShape shape = make_shape(9, 3, 64);
  Batch batch;
  CHECK(Planned(shape, batch.layout(), 0).work.items.empty());
  batch.add(100, 0);
  CHECK(Planned(shape, batch.layout(), 100).work.items.empty());
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
  AttentionWork whole;
  plan_attention(shape, layout, whole);
  whole.items.clear();
  whole.merges.clear();
  for (size_t i = 0; i < whole.tiles.size(); ++i) {
    whole.items.push_back({static_cast<int32_t>(i), 0, whole.tiles[i].end_unit, -1, -1});
  }
  ThreadPool pool(2);
  Planned planned(shape, layout, 1000);
  CHECK_EQ(planned.work.merges.size(), static_cast<size_t>(2 * shape.num_kv_heads));
  std::vector<float> split(q.size()), direct(q.size());
  AttentionProblem problem;
  problem.q = {reinterpret_cast<const uint8_t*>(q.data()), DType::f32, shape.head_dim, cols,
               shape.head_dim};
  problem.out_stride = cols;
  problem.num_qo_heads = shape.num_qo_heads;
  problem.num_kv_heads = shape.num_kv_heads;
  problem.k = keys_of(cache.layer);
  problem.v = values_of(cache.layer);
  problem.batch = layout;
  problem.work = planned.work;
  problem.done = planned.done.data();
  problem.partial_out = planned.partial_out.data();
  problem.partial_ms = planned.partial_ms.data();
  problem.sm_scale = 0.2f;
  problem.out = reinterpret_cast<uint8_t*>(split.data());
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
      cpu::store_operand_row(isa)(act, row, split.data() + row * cols);
    }
    CHECK(std::memcmp(aligned(got), aligned(expected), bytes) == 0);
  }
  problem.out_operand = {};
  problem.work = whole;
  problem.out = reinterpret_cast<uint8_t*>(direct.data());
  run_alone(problem, pool);
  CHECK(split == direct);
}

}  // namespace

TEST("split or not, as floats or as an operand: the same bits") {
  for (const Isa isa : available_isas()) {
    set_isa(isa);
    check_split(make_shape(4, 2, 48), isa);  // heads share blocks of the operand
    check_split(make_shape(9, 3, 64), isa);  // each head has its own
    check_split(make_shape(5, 5, 32), isa);  // the operand has padding
  }
}

CHECK_MAIN()
