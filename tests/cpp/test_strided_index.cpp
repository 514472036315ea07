// Lists of a fixed pattern, bit by bit as a page's number says, of blocks of prompts, of generated
// rows and of trees; and what the heads have together.
#include <random>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "effinfer/threads.h"
#include "ops/registry.h"
#include "ops/strided_index.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;

constexpr int32_t kHeads = 5;
constexpr int64_t kMost = 1500;

struct Rows {
  explicit Rows(const std::vector<int32_t>& kv_len, const std::vector<int32_t>& rows)
      : lengths(kv_len), buffers(shape(), 2000, 8, kMost) {
    for (const int32_t count : rows) indptr.push_back(indptr.back() + count);
    batch.num_tokens = indptr.back();
    batch.num_sequences = static_cast<int64_t>(lengths.size());
    batch.qo_indptr = indptr.data();
    batch.kv_len = lengths.data();
  }
  static VisitShape shape() {
    VisitShape shape;
    shape.num_qo_heads = 2 * kHeads;
    shape.num_kv_heads = kHeads;
    shape.rows = true;
    return shape;
  }
  const VisitPlan& choose(StridedIndexProblem p) {
    p.batch = batch;
    p.visits = plan = buffers.plan(batch);
    p.heads = heads.data();
    run_alone(p, pool);
    return plan;
  }

  std::vector<int32_t> lengths, indptr = {0};
  std::vector<IndexedHead> heads = std::vector<IndexedHead>(kHeads, IndexedHead::chosen);
  BatchLayout batch;
  VisitBuffers buffers;
  VisitPlan plan;
  ThreadPool pool{2};
};

bool has(const VisitPlan& plan, int64_t block, int32_t head, int64_t token) {
  return plan.list(block, head)[token / 64] >> token % 64 & 1;
}

// Of the tokens up to the block's last row, which is at `last`.
bool expected(const StridedIndexProblem& p, const VisitBlock& block, int32_t head, int64_t token) {
  if (block.position + block.num_rows < p.min_tokens || token < p.sink_tokens) return true;
  const int64_t page = token / 64;
  if (page % p.stride == (head + p.shift) % p.stride) return true;
  int64_t local = 1;
  while (64 * local < p.local_tokens) ++local;
  return page >= block.position / 64 - local;
}

TEST("lists are the pattern's, in prompts and for generated rows") {
  std::mt19937 random(2);
  Rows rows({1, 64, 700, 1500, 1030, 900}, {1, 64, 130, 1, 30, 500});
  int left_out = 0;
  for (int turn = 0; turn < 20; ++turn) {
    StridedIndexProblem p;
    p.stride = 1 + turn % 7;
    p.shift = static_cast<int32_t>(random() % 9);
    p.sink_tokens = turn % 3 * 5;
    p.local_tokens = static_cast<int32_t>(random() % 400);
    p.min_tokens = turn % 4 == 0 ? 1000 : 0;
    const VisitPlan& plan = rows.choose(p);
    CHECK_EQ(plan.num_rows, int64_t{32});
    CHECK_EQ(plan.num_blocks, int64_t{1 + 3 + 8});
    for (int64_t i = 0; i < plan.num_blocks + plan.num_rows; ++i) {
      const VisitBlock& block = plan.blocks[i];
      for (int32_t head = 0; head < kHeads; ++head) {
        for (int64_t token = 0; token < block.position + block.num_rows; ++token) {
          const bool visited = has(plan, i, head, token);
          CHECK_EQ(visited, expected(p, block, head, token));
          left_out += visited ? 0 : 1;
        }
      }
    }
  }
  CHECK(left_out > 100000);
}

TEST("as many heads as pages in a stride visit all keys together") {
  Rows rows({1500, 1200}, {1, 200});
  StridedIndexProblem p;
  p.stride = kHeads;
  p.shift = 3;
  const VisitPlan& plan = rows.choose(p);
  for (int64_t i = 0; i < plan.num_blocks + plan.num_rows; ++i) {
    const VisitBlock& block = plan.blocks[i];
    const int64_t local = (block.position / 64 - 1) * 64;
    for (int64_t token = 0; token < local; ++token) {
      int heads = 0;
      for (int32_t head = 0; head < kHeads; ++head) heads += has(plan, i, head, token) ? 1 : 0;
      CHECK_EQ(heads, 1);
    }
  }
}

TEST("a row of a tree visits what lies between its place and where it would be alone") {
  Rows rows({1000}, {40});
  const std::vector<uint64_t> ancestors(40, 1);  // siblings, the first of which all descend from
  rows.batch.ancestors = ancestors.data();
  StridedIndexProblem p;
  p.stride = 100;
  p.shift = 50;
  const VisitPlan& plan = rows.choose(p);
  CHECK_EQ(plan.num_rows, int64_t{40});
  for (int64_t i = 0; i < 40; ++i) {
    CHECK_EQ(plan.blocks[i].position, 960);
    for (int64_t token = 0; token < 960 + i; ++token) {
      CHECK_EQ(has(plan, i, 0, token), token >= (960 / 64 - 1) * 64);
    }
  }
}

TEST("heads of other indices stay as they are, and dense ones visit all keys") {
  Rows rows({900}, {1});
  rows.heads[1] = IndexedHead::other;
  rows.heads[2] = IndexedHead::dense;
  StridedIndexProblem p;
  p.stride = 4;
  const VisitPlan before = rows.buffers.plan(rows.batch);
  for (int64_t word = 0; word < 15; ++word) before.list(0, 1)[word] = 0x5555;
  const VisitPlan& plan = rows.choose(p);
  for (int64_t word = 0; word < 15; ++word) {
    CHECK_EQ(plan.list(0, 1)[word], uint64_t{0x5555});
    CHECK_EQ(plan.list(0, 2)[word], ~uint64_t{0});
  }
}

}  // namespace

CHECK_MAIN()
