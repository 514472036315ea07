// key_index whose rows visit what an earlier one has chosen: when they do, that the lists are then
// its own, and that they are those of rows that choose where they do not.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "kv_model.h"
#include "ops/page_index.h"
#include "ops/registry.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;

constexpr int32_t kHeads = 6;
constexpr int32_t kKvHeads = 2;
constexpr int32_t kDim = 16;
constexpr int64_t kRow = int64_t{kHeads} * kDim;
constexpr int32_t kStart = 690;  // the place of row 0; that of row 14 is on another page
constexpr int32_t kRows = 30;

struct Fixture {
  Fixture()
      : model({.num_layers = 1,
               .num_kv_heads = kKvHeads,
               .head_dim = kDim,
               .dtype = DType::f32,
               .num_pages = 20}) {
    std::mt19937 random(4);
    id = model.create({});
    model.feed(id, std::vector<int32_t>(kStart + kRows, 5));
    q = normals(kRows * kRow, random);
    VisitShape shape;
    shape.num_qo_heads = kHeads;
    shape.num_kv_heads = kKvHeads;
    shape.blocks = false;
    shape.rows = true;
    buffers = VisitBuffers(shape, kRows, 1, 1024);
  }

  float* row(int32_t index) { return q.data() + index * kRow; }
  // A row's queries become those of another one, in other lengths.
  void copy(int32_t from, int32_t to) {
    for (int64_t i = 0; i < kRow; ++i) row(to)[i] = 3.0f * row(from)[i];
  }

  // The rows [begin, begin + count) in a step: of each the words of the KV heads.
  std::vector<std::vector<uint64_t>> run(int32_t begin, int32_t count, float reuse,
                                         const std::string& name = "kept") {
    ThreadPool pool(2);
    const std::vector<int32_t> qo_indptr = {0, count}, kv_len = {kStart + begin + count};
    const auto pages = model.cache.pages(id);
    const std::vector<int32_t> kv_indptr = {0, static_cast<int32_t>(pages.size())};
    if (!has_plane) model.cache.add_plane(id, "kept");
    has_plane = true;
    const std::vector<ScoredRows> scored = {{"kept", plane(), 0, count}};
    PageIndexProblem p;
    p.q = row(begin);
    p.q_stride = kRow;
    p.num_qo_heads = kHeads;
    p.kv = KvCacheAccess::layers(model.cache)[0];
    p.batch.num_tokens = count;
    p.batch.num_sequences = 1;
    p.batch.qo_indptr = qo_indptr.data();
    p.batch.kv_indptr = kv_indptr.data();
    p.batch.kv_indices = pages.data();
    p.batch.kv_len = kv_len.data();
    const VisitPlan plan = p.visits = buffers.plan(p.batch);
    p.sm_scale = 0.4f;
    p.sink_tokens = 64;
    p.unit = 1;
    p.keys = 20;
    p.vote = HeadVote::sum;
    const std::vector<IndexedHead> heads(kKvHeads, IndexedHead::chosen);
    p.heads = heads.data();
    p.max_kv_len = 1024;
    p.reuse = reuse;
    p.planes = {name, scored.data(), 1, 0};
    run_alone(p, pool);
    std::vector<std::vector<uint64_t>> lists;
    for (int32_t i = 0; i < count; ++i) {
      const int64_t words = (kStart + begin + i) / 64 + 1;
      lists.emplace_back();
      for (int32_t head = 0; head < kKvHeads; ++head) {
        const uint64_t* list = plan.list(i, head);
        lists.back().insert(lists.back().end(), list, list + words);
      }
    }
    return lists;
  }

  SlotPlane plane() { return model.cache.plane(id, "kept"); }
  // How many rows chose and how many did not.
  std::pair<float, float> counts(int32_t head) {
    const float* own = plane().values + head * plane().stride;
    return {own[4], own[5]};
  }

  KvModel model;
  SequenceId id = 0;
  std::vector<float> q;
  VisitBuffers buffers;
  bool has_plane = false;
};

// Of the tokens that are chosen from: those before the newest two pages.
std::vector<uint64_t> chosen(const std::vector<uint64_t>& words) {
  std::vector<uint64_t> of_both;
  for (size_t head = 0; head < 2; ++head) {
    const auto first = words.begin() + static_cast<int64_t>(head * (words.size() / 2));
    of_both.insert(of_both.end(), first, first + 9);
  }
  return of_both;
}

TEST("rows whose queries are alike visit what the first of them has chosen") {
  at_every_isa([] {
    Fixture f;
    for (const int32_t row : {1, 2, 5}) f.copy(0, row);
    f.row(2)[0] += 0.01f;
    const auto own = f.run(0, 8, 0.0f);
    const auto lists = f.run(0, 8, 0.99f);
    for (size_t row = 0; row < 8; ++row) {
      if (row == 1 || row == 2) {
        CHECK(chosen(lists[row]) == chosen(lists[0]));
      } else {
        CHECK(lists[row] == own[row]);
      }
    }
    CHECK(chosen(own[3]) != chosen(own[0]));
    CHECK((f.counts(0) == std::pair(6.0f, 2.0f)));
    CHECK((f.counts(1) == std::pair(6.0f, 2.0f)));
  });
}

TEST("a choice is of its KV head") {
  Fixture f;
  f.copy(0, 1);
  for (int64_t i = kRow / 2; i < kRow; ++i) f.row(1)[i] = -f.row(0)[i];
  f.run(0, 2, 0.5f);
  CHECK((f.counts(0) == std::pair(1.0f, 1.0f)));
  CHECK((f.counts(1) == std::pair(2.0f, 0.0f)));
}

TEST("a cosine is above the bound or it is not") {
  Fixture f;
  for (const auto& [reuse, reused] : {std::pair(0.59f, true), {0.61f, false}}) {
    // 3 parts of what chose and 4 of what stands upright on it: a cosine of 0.6.
    for (int32_t i = 0; i < kRow; ++i) {
      f.row(0)[i] = i % 2 == 0 ? 1.0f : 0.0f;
      f.row(1)[i] = i % 2 == 0 ? 3.0f : 4.0f;
    }
    f.run(0, 2, reuse);
    CHECK_EQ(f.counts(0).second, 1.0f);  // of the first turn
    CHECK_EQ(f.counts(0).first, reused ? 1.0f : 3.0f);
  }
}

TEST("a choice holds on its page, for the row that comes next") {
  Fixture f;
  for (int32_t row = 1; row < kRows; ++row) f.copy(0, row);
  f.run(0, kRows, 0.9f);  // places 690 to 703, and those from 704 on
  CHECK((f.counts(0) == std::pair(2.0f, 28.0f)));
  f.run(10, 1, 0.9f);  // fed again, as after a rollback
  CHECK((f.counts(0) == std::pair(3.0f, 28.0f)));
  f.run(11, 1, 0.9f);
  CHECK((f.counts(0) == std::pair(3.0f, 29.0f)));
  f.run(13, 1, 0.9f);  // one was left out
  CHECK((f.counts(0) == std::pair(4.0f, 29.0f)));
}

TEST("steps of any size choose alike, and rows without a plane for themselves") {
  Fixture each, together;
  for (Fixture* f : {&each, &together}) {
    for (const int32_t row : {1, 2, 6, 15, 16, 20}) f->copy(row - 1, row);
  }
  std::vector<std::vector<uint64_t>> lists;
  for (int32_t row = 0; row < kRows; ++row) lists.push_back(each.run(row, 1, 0.9f)[0]);
  CHECK(together.run(0, kRows, 0.9f) == lists);
  CHECK(each.counts(0) == together.counts(0));
  CHECK(each.counts(0).second >= 6.0f);
  CHECK(together.run(0, kRows, 0.9f, "another") == each.run(0, kRows, 0.0f));
}

}  // namespace

CHECK_MAIN()
