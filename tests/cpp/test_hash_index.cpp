// What hash_index is made of beside its operator (tests/ops/test_hash_visits.py): how likely keys
// are to be drawn, beside sums of logarithms in float64; and whose lists it writes.
#include <cmath>
#include <numbers>
#include <random>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "effinfer/ops/attention.h"
#include "ops/hash_index.h"
#include "ops/paged_batch.h"
#include "ops/registry.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;

// That n of `tables` collide, each with probability x.
double chance_of(int n, int tables, double x) {
  if (x >= 1.0) return n == tables ? 1.0 : 0.0;
  if (x <= 0.0) return n == 0 ? 1.0 : 0.0;
  return std::exp(std::lgamma(tables + 1.0) - std::lgamma(n + 1.0) - std::lgamma(tables - n + 1.0) +
                  n * std::log(x) + (tables - n) * std::log1p(-x));
}

TEST("the chance of colliding twice is the sum over all numbers of tables") {
  for (const int bits : {1, 2, 3, 4, 8}) {
    for (const int tables : {8, 40, 128, 256}) {
      const std::vector<float> chances = hash_chances({1, tables, bits});
      for (int step = 0; step <= kChanceSteps; step += step < 2000 ? 50 : 1) {
        const double angle = std::acos(step / (kChanceSteps / 2.0) - 1.0);
        const double x = std::pow(1.0 - angle / std::numbers::pi, bits);
        double expected = 0.0;
        for (int n = 2; n <= tables; ++n) expected += chance_of(n, tables, x);
        const auto got = double{chances[static_cast<size_t>(step)]};
        CHECK(std::abs(got - expected) <= 1e-6 * expected + 1e-12);
      }
    }
  }
}

TEST("heads of other indices stay as they are, and dense ones visit all keys") {
  constexpr int32_t kDim = 16, kTokens = 300;
  const std::vector<int32_t> qo_indptr = {0, 1}, whole = {0, kTokens}, kv_indptr = {0, 5};
  const std::vector<int32_t> pages = {0, 1, 2, 3, 4}, kv_len = {kTokens};
  std::mt19937 random(1);
  ThreadPool pool(2);
  PagedKv kv(5, 3, kDim, DType::f32);
  const std::vector<float> keys = normals(int64_t{kTokens} * 3 * kDim, random);
  const TensorView rows = {keys.data(), DType::f32, {kTokens, 3, kDim}};
  kv_append(kv, rows, rows, {ints(whole), ints(kv_indptr), ints(pages), ints(kv_len)}, pool);
  VisitShape shape;
  shape.num_qo_heads = shape.num_kv_heads = 3;
  shape.rows = shape.row_weights = true;
  VisitBuffers buffers(shape, 8, 1, kTokens);
  HashIndexProblem p;
  p.q = keys.data();
  p.q_stride = 3 * kDim;
  p.num_qo_heads = 3;
  p.kv = layer_of(kv);
  p.batch.num_tokens = p.batch.num_sequences = 1;
  p.batch.qo_indptr = qo_indptr.data();
  p.batch.kv_indptr = kv_indptr.data();
  p.batch.kv_indices = pages.data();
  p.batch.kv_len = kv_len.data();
  p.visits = buffers.plan(p.batch);
  p.tables = {1, 8, 8};
  const std::vector<float> planes = hash_planes(p.tables, kDim, 0),
                           chances = hash_chances(p.tables);
  const std::vector<float> means(3 * kDim);
  p.planes = planes.data();
  p.chances = chances.data();
  p.means = means.data();
  const std::vector<IndexedHead> heads = {IndexedHead::other, IndexedHead::dense,
                                          IndexedHead::chosen};
  p.heads = heads.data();
  for (int64_t word = 0; word < 5; ++word) p.visits.list(0, 0)[word] = 0x5555;
  run_alone(p, pool);
  for (int64_t word = 0; word < 5; ++word) {
    CHECK_EQ(p.visits.list(0, 0)[word], uint64_t{0x5555});
    CHECK_EQ(p.visits.list(0, 1)[word], ~uint64_t{0});
  }
  CHECK(p.visits.list(0, 2)[1] != ~uint64_t{0});
  CHECK_EQ(p.visits.weighted[1], 0);
  CHECK_EQ(p.visits.weighted[2], 1);
}

}  // namespace

CHECK_MAIN()
