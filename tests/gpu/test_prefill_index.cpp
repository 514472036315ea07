// The keys that blocks of query rows visit, chosen on the GPU: the CPU's lists, but for scores that
// rounding cannot tell apart.
#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/index_step.h"
#include "gpu/mutations.h"
#include "gpu/paths.h"
#include "ops/column_scratch.h"
#include "ops/prefill_index.h"

namespace effinfer {
namespace {

using ops::BlockIndexProblem;
using ops::ColumnIndexProblem;
using ops::IndexedHead;

// A step of prompts.
class Prefill {
 public:
  Prefill(const Cache& cache, const std::vector<Part>& parts) : step_(cache, parts, false) {}

  std::vector<IndexedHead>& indexed() { return step_.indexed(); }
  // For how many sequences there is memory at once.
  void set_scored(int64_t sequences) { scored_ = sequences; }
  void set_query(size_t index, float value) { step_.set_query(index, value); }

  // Words [list][word], kUntouched where nobody wrote.
  template <class Problem>
  std::vector<uint64_t> on_cpu(Problem problem) {
    return step_.on_cpu(problem.in, [&](ThreadPool& pool) { ops::run_alone(problem, pool); });
  }

  template <class Problem>
  std::vector<uint64_t> on_gpu(Problem problem) {
    const ops::VisitPlan& plan = step_.plan();
    const DeviceArray<ops::VisitSequence> sequences(
        std::vector<ops::VisitSequence>(plan.sequences, plan.sequences + plan.num_sequences));
    const int64_t each =
        ops::ColumnScratch::of(plan.list_words).bytes() * step_.cache().heads().qo_heads();
    const int64_t at_once = std::min(scored_, std::max<int64_t>(plan.num_sequences, 1));
    const DeviceArray<std::byte> scores(static_cast<size_t>(each * at_once));
    return step_.on_gpu(problem.in, {}, [&] {
      problem.in.visits.sequences = sequences.data();
      problem.in.visits.scores = scores.data();
      problem.in.visits.score_sequences = at_once;
      run_on_gpu(problem);
    });
  }

  static constexpr uint64_t kUntouched = IndexStep::kUntouched;

 private:
  IndexStep step_;
  int64_t scored_ = 64;
};

// Tokens that one list has and the other has not, of all.
struct Difference {
  int64_t tokens = 0;
  int64_t of = 0;
};
Difference difference(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  Difference out;
  for (size_t i = 0; i < a.size(); ++i) {
    out.tokens += std::popcount(a[i] ^ b[i]);
    out.of += std::popcount(b[i]);
  }
  return out;
}

TEST("pages by antidiagonals and means are the CPU's") {
  int64_t wrong = 0;
  int64_t all = 0;
  int turn = 0;
  for (const DType kv : {DType::bf16, DType::f16, DType::i8, DType::f32}) {
    for (const int32_t stride : {0, 4, 8, 16, 32}) {
      const Heads heads{kv, stride == 32 ? 32 : 64, 2, stride == 8 ? 3 : 2, DType::f32};
      Cache cache(heads, static_cast<uint32_t>(stride + 7));
      cache.add(500);
      cache.add(200);
      cache.add(64);
      cache.upload();
      Prefill prefill(cache, {{0, 500, 130}, {1, 200, 200}, {2, 64, 64}, {1, 40, 40}});
      for (const TopScores& top :
           {TopScores{3, 0.0f}, TopScores{0, 0.7f}, TopScores{0, 0.0f}, TopScores{100, 0.0f}}) {
        // One of three: all of each, as there are four.
        if (turn++ % 3 != 0) continue;
        BlockIndexProblem p;
        p.stride = stride;
        p.pages = top;
        p.in.sink_tokens = 5;
        p.in.local_tokens = 70;
        const Difference off = difference(prefill.on_gpu(p), prefill.on_cpu(p));
        wrong += off.tokens;
        all += off.of;
      }
    }
  }
  // Queries are rounded: now and then a page is chosen in place of one that is hardly behind it.
  if (wrong * 100 > all) {
    check::fail(__FILE__, __LINE__, std::to_string(wrong) + " of " + std::to_string(all));
  }
}

TEST("pages within a budget of all heads, and by probe queries, are the CPU's") {
  int64_t wrong = 0;
  int64_t all = 0;
  int turn = 0;
  for (const DType kv : {DType::bf16, DType::f16, DType::i8, DType::f32}) {
    for (const int32_t group : {1, 3, 17}) {
      const bool wide = group == 17;
      Cache cache({kv, wide ? 16 : 64, 2, group, DType::f32}, static_cast<uint32_t>(turn + 11));
      cache.add(900);
      cache.add(200);
      cache.add_constant(300);
      cache.upload();
      Prefill prefill(cache, {{0, 900, 130}, {1, 200, 200}, {2, 300, 64}, {1, 40, 40}});
      for (int i = 0; i < 3; ++i, ++turn) {
        BlockIndexProblem p;
        p.stride = i == 1 ? 8 : 0;
        p.probe = i != 1;
        p.in.sink_tokens = turn % 4 == 0 ? 5 : 130;
        p.in.local_tokens = turn % 3 == 0 ? 0 : 70;
        if (i == 2) {
          p.pages = {2, 0.0f};
        } else {
          p.keys = turn % 4 == 3 ? 0 : 192;
          p.share = turn % 4 == 3 ? 0.25f : 0.0f;
        }
        const Difference off = difference(prefill.on_gpu(p), prefill.on_cpu(p));
        wrong += off.tokens;
        all += off.of;
      }
    }
  }
  // As above.
  if (wrong * 100 > all) {
    check::fail(__FILE__, __LINE__, std::to_string(wrong) + " of " + std::to_string(all));
  }
}

TEST("a budget of none, or of all pages") {
  Cache cache({DType::bf16, 32, 1, 2, DType::f32}, 5);
  cache.add(400);
  cache.upload();
  Prefill prefill(cache, {{0, 400, 100}});
  for (const float share : {1e-9f, 1.0f}) {
    BlockIndexProblem p;
    p.share = share;
    p.in.sink_tokens = 64;
    CHECK(prefill.on_gpu(p) == prefill.on_cpu(p));
    p.in.local_tokens = 500;
    CHECK(prefill.on_gpu(p) == prefill.on_cpu(p));
  }
}

ColumnIndexProblem columns_of(const TopScores& columns, const TopScores& slashes) {
  ColumnIndexProblem p;
  p.columns = columns;
  p.slashes = slashes;
  return p;
}

void expect_alike(const Difference& off) {
  if (off.tokens * 100 <= off.of) return;
  check::fail(__FILE__, __LINE__, std::to_string(off.tokens) + " of " + std::to_string(off.of));
}

TEST("columns and slashes are the CPU's") {
  struct Asked {
    int32_t last_rows;
    int32_t row_stride;
  };
  Difference all;
  int turn = 0;
  for (const DType kv : {DType::bf16, DType::f16, DType::i8, DType::f32}) {
    // Tiles of fewer rows than 64, of more, in steps.
    for (const Asked asked :
         {Asked{64, 0}, Asked{20, 0}, Asked{100, 0}, Asked{0, 7}, Asked{0, 1}}) {
      const int32_t group = asked.last_rows == 20 ? 3 : 2;
      Cache cache({kv, asked.row_stride == 7 ? 16 : 64, 2, group, DType::f32},
                  static_cast<uint32_t>(asked.last_rows + 7));
      cache.add(500);
      cache.add(200);
      cache.add(64);
      cache.upload();
      Prefill prefill(cache, {{0, 500, 130}, {1, 200, 200}, {2, 64, 64}, {1, 40, 40}});
      prefill.set_scored(asked.last_rows == 64 ? 1 : 2);
      for (const auto& [columns, slashes] :
           {std::pair<TopScores, TopScores>{{30, 0.0f}, {12, 0.0f}},
            {{0, 0.3f}, {0, 0.2f}},
            {{9, 0.0f}, {0, 0.0f}},
            {{0, 0.0f}, {0, 0.25f}},
            {{0, 0.0f}, {0, 0.0f}},
            {{1000, 0.0f}, {1, 0.0f}}}) {
        // One of five: all of each, as there are six.
        if (turn++ % 5 != 0) continue;
        ColumnIndexProblem p = columns_of(columns, slashes);
        p.last_rows = asked.last_rows;
        p.row_stride = asked.row_stride;
        p.in.sink_tokens = 5;
        p.in.local_tokens = 9;
        const Difference off = difference(prefill.on_gpu(p), prefill.on_cpu(p));
        all.tokens += off.tokens;
        all.of += off.of;
      }
    }
  }
  expect_alike(all);
}

TEST("columns of long sequences are found by several blocks") {
  Cache cache({DType::bf16, 16, 1, 2, DType::f32}, 8);
  cache.add(2700);
  cache.add(1100);
  cache.upload();
  CHECK(ops::ColumnScratch::of(2700 / 64 + 1).parts == 3);
  Prefill prefill(cache, {{0, 2700, 90}, {1, 1100, 70}});
  Difference all;
  for (const auto& [columns, slashes] :
       {std::pair<TopScores, TopScores>{{200, 0.0f}, {100, 0.0f}}, {{0, 0.2f}, {0, 0.1f}}}) {
    constexpr int32_t kStrides[] = {1, 0, 30};
    for (const int32_t stride : of_one_path(kStrides)) {
      ColumnIndexProblem p = columns_of(columns, slashes);
      p.row_stride = stride;
      const Difference off = difference(prefill.on_gpu(p), prefill.on_cpu(p));
      all.tokens += off.tokens;
      all.of += off.of;
    }
  }
  expect_alike(all);
}

TEST("columns of a sequence do not depend on those beside it") {
  Cache cache({DType::bf16, 32, 2, 2, DType::f32}, 9);
  cache.add(300);
  cache.add(180);
  cache.upload();
  ColumnIndexProblem p = columns_of({20, 0.0f}, {10, 0.0f});
  Prefill both(cache, {{1, 180, 100}, {0, 300, 90}});
  const std::vector<uint64_t> words = both.on_gpu(p);
  both.set_scored(1);
  CHECK(both.on_gpu(p) == words);
  Prefill alone(cache, {{0, 300, 90}});
  const std::vector<uint64_t> expected = alone.on_gpu(p);
  const auto tail = static_cast<ptrdiff_t>(words.size() - expected.size());
  CHECK(std::vector<uint64_t>(words.begin() + tail, words.end()) == expected);
}

TEST("pages of float32 are chosen from as those of bfloat16") {
  std::vector<std::vector<uint64_t>> words;
  for (const DType kv : {DType::bf16, DType::f32}) {
    // Of one seed, and rounded by the kernels where the cache has not rounded them.
    Cache cache({kv, 48, 2, 2, DType::f32}, 10);
    cache.add(700);
    cache.upload();
    Prefill prefill(cache, {{0, 700, 130}});
    BlockIndexProblem p;
    p.pages = {3, 0.0f};
    for (const int32_t stride : {0, 4, 16}) {
      p.stride = stride;
      words.push_back(prefill.on_gpu(p));
    }
    words.push_back(prefill.on_gpu(columns_of({0, 0.3f}, {20, 0.0f})));
  }
  for (size_t i = 0; i < 4; ++i) CHECK(words[i] == words[i + 4]);
}

TEST("nothing is chosen by queries that are no numbers") {
  Cache cache({DType::bf16, 32, 1, 1, DType::f32}, 9);
  cache.add(300);
  cache.upload();
  Prefill prefill(cache, {{0, 300, 64}});
  prefill.set_query(5, NAN);
  ColumnIndexProblem nothing;
  nothing.in.sink_tokens = 3;
  for (const TopScores& top : {TopScores{7, 0.0f}, TopScores{0, 0.5f}}) {
    ColumnIndexProblem p = columns_of(top, top);
    p.in.sink_tokens = 3;
    CHECK(prefill.on_gpu(p) == prefill.on_cpu(nothing));
  }
}

TEST("columns of equal scores are the first ones") {
  Cache cache({DType::bf16, 32, 1, 1, DType::f32}, 4);
  cache.add_constant(640);
  cache.upload();
  Prefill prefill(cache, {{0, 640, 64}});
  ColumnIndexProblem p = columns_of({70, 0.0f}, {});
  p.last_rows = 1;
  const std::vector<uint64_t> words = prefill.on_gpu(p);
  for (size_t i = 0; i < 10; ++i) {
    CHECK_EQ(words[i], i == 0 || i == 9 ? ~uint64_t{0} : i == 1 ? uint64_t{0x3f} : uint64_t{0});
  }
}

TEST("heads of other indices stay as they are, dense ones and short sequences visit all") {
  Cache cache({DType::bf16, 32, 3, 1, DType::f32}, 3);
  cache.add(300);
  cache.add(120);
  cache.upload();
  Prefill prefill(cache, {{0, 300, 200}, {1, 120, 100}});
  prefill.indexed() = {IndexedHead::other, IndexedHead::dense, IndexedHead::chosen};
  BlockIndexProblem p;
  p.stride = 8;
  p.pages = {1, 0.0f};
  p.in.min_tokens = 200;
  CHECK(prefill.on_gpu(p) == prefill.on_cpu(p));
  p.in.product_cost = 1.5f;
  CHECK(prefill.on_gpu(p) == prefill.on_cpu(p));
  ColumnIndexProblem columns = columns_of({3, 0.0f}, {2, 0.0f});
  columns.in.min_tokens = 200;
  CHECK(prefill.on_gpu(columns) == prefill.on_cpu(columns));
}

TEST("equal scores go to the first pages") {
  Cache cache({DType::bf16, 32, 1, 1, DType::f32}, 4);
  cache.add_constant(640);
  cache.upload();
  Prefill prefill(cache, {{0, 640, 64}});
  BlockIndexProblem p;
  p.stride = 0;
  p.pages = {3, 0.0f};
  const std::vector<uint64_t> words = prefill.on_gpu(p);
  for (size_t i = 0; i < 10; ++i) CHECK_EQ(words[i], i < 3 || i == 9 ? ~uint64_t{0} : uint64_t{0});
}

TEST("every barrier is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no race is detected");
  Cache cache({DType::bf16, 32, 1, 3, DType::f32}, 5);
  cache.add(400);
  cache.add_constant(320);
  cache.upload();
  Prefill prefill(cache, {{0, 400, 64}, {1, 320, 64}});
  BlockIndexProblem p;
  p.stride = 8;
  p.pages = {2, 0.0f};
  BlockIndexProblem mass = p;
  mass.pages = {0, 0.5f};
  BlockIndexProblem budget;
  budget.probe = true;
  budget.keys = 64;
  budget.in.sink_tokens = 64;
  const std::vector<uint64_t> expected = prefill.on_gpu(p);
  const std::vector<uint64_t> expected_mass = prefill.on_gpu(mass);
  const std::vector<uint64_t> expected_budget = prefill.on_gpu(budget);
  expect_every_barrier_matters(
      [&] {
        return prefill.on_gpu(p) == expected && prefill.on_gpu(mass) == expected_mass &&
               prefill.on_gpu(budget) == expected_budget;
      },
      3);
}

TEST("every barrier of the kernels of columns is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no race is detected");
  Cache cache({DType::bf16, 32, 1, 1, DType::f32}, 5);
  cache.add(480);
  cache.add_constant(320);
  cache.upload();
  Prefill prefill(cache, {{0, 480, 70}, {1, 320, 64}});
  const ColumnIndexProblem p = columns_of({20, 0.0f}, {10, 0.0f});
  // In two tiles, whose diagonals are not the same threads'.
  ColumnIndexProblem mass = columns_of({0, 0.5f}, {0, 0.3f});
  mass.last_rows = 70;
  const std::vector<uint64_t> expected = prefill.on_gpu(p);
  const std::vector<uint64_t> expected_mass = prefill.on_gpu(mass);
  expect_every_barrier_matters(
      [&] { return prefill.on_gpu(p) == expected && prefill.on_gpu(mass) == expected_mass; }, 3);
}

TEST("what the kernel cannot do is refused") {
  BlockIndexProblem p;
  p.in.kv.dtype = DType::i32;
  p.in.kv.head_dim = 64;
  p.in.kv.num_kv_heads = p.in.num_qo_heads = 1;
  CHECK_THROWS(Unsupported, "kv_dtype is not f32, f16, bf16 or i8", run_on_gpu(p));
  p.in.kv.dtype = DType::bf16;
  p.stride = 64;
  CHECK_THROWS(Unsupported, "above 2048", run_on_gpu(p));
  p.stride = 16;
  p.in.max_kv_len = 4097 * 64;
  CHECK_THROWS(Unsupported, "above 12288", run_on_gpu(p));
  p.stride = 0;
  p.probe = true;
  p.in.num_qo_heads = 129;
  CHECK_THROWS(Unsupported, "x head_dim are above 8192", run_on_gpu(p));
  p.in.num_qo_heads = 1;
  ColumnIndexProblem columns;
  columns.in = p.in;
  columns.in.kv.head_dim = 272;
  CHECK_THROWS(Unsupported, "head_dim is above 256", run_on_gpu(columns));
  columns.in.kv.dtype = DType::i32;
  CHECK_THROWS(Unsupported, "kv_dtype is not f32, f16, bf16 or i8", run_on_gpu(columns));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
