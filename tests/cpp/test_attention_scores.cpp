// Scores of keys and the lists made from them, on random sequences at every ISA level: sums that
// must come out, and lists that an AttentionPlan takes.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "effinfer/error.h"
#include "effinfer/ops/attention_scores.h"
#include "effinfer/ops/token_index.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;

StridedView rows_of(std::vector<float>& values, const Dims& dims) {
  return StridedView::dense(values.data(), DType::f32, dims);
}

// Sequences of random lengths, 0 and 1 among them, over ragged keys of exactly their size.
struct Batch {
  explicit Batch(std::mt19937& random) {
    const int32_t heads[][3] = {{1, 1, 8}, {6, 2, 33}, {4, 1, 64}, {96, 1, 16}};
    const auto& [qo, kv, dim] = heads[random() % 4];
    geometry = {qo, kv, dim, dim, 1, true, -1};
    for (int32_t s = 0; s < 3; ++s) {
      const auto length = static_cast<int32_t>(random() % 3 == 0 ? random() % 3 : random() % 600);
      const auto rows = static_cast<int32_t>(length == 0 ? 0 : random() % (length + 1));
      kv_len.push_back(length);
      qo_indptr.push_back(qo_indptr.back() + std::min(rows, 128));
      kv_indptr.push_back(kv_indptr.back() + length);
    }
    q_data = normals(int64_t{qo_indptr.back()} * qo * dim, random);
    k_data = normals(int64_t{kv_indptr.back()} * kv * dim, random);
    q = rows_of(q_data, {qo_indptr.back(), qo, dim});
    k = rows_of(k_data, {kv_indptr.back(), kv, dim});
    sequences.qo_indptr = ints(qo_indptr);
    sequences.kv_indptr = ints(kv_indptr);
    sequences.kv_len = ints(kv_len);
  }
  Batch(const Batch&) = delete;

  IndexRows rows(int32_t block_size) const {
    return {"test", ints(qo_indptr), ints(kv_len), geometry.num_kv_heads, block_size, true, 2, 3};
  }

  AttentionGeometry geometry;
  std::vector<int32_t> qo_indptr = {0}, kv_indptr = {0}, kv_len;
  std::vector<float> q_data, k_data;
  StridedView q, k;
  AttentionSequences sequences;
};

double total(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float x : values) sum += x;
  return sum;
}

TEST("every row's probabilities are 1 together, by key and by distance") {
  std::mt19937 random(1);
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    Batch batch(random);
    AttentionScoresInputs inputs;
    inputs.q = batch.q;
    inputs.k = batch.k;
    inputs.sm_scale = 0.3f;
    const double rows = double{1} * batch.qo_indptr.back() * batch.geometry.num_qo_heads;
    std::vector<float> sums(static_cast<size_t>(batch.kv_indptr.back()) *
                            static_cast<size_t>(batch.geometry.num_qo_heads));
    std::vector<float> distances = sums;
    at_every_isa([&] {
      attention_scores(batch.geometry, batch.sequences, inputs, sums.data(), distances.data(),
                       pool);
      CHECK(std::abs(total(sums) - rows) <= 1e-5 * rows);
      CHECK(std::abs(total(distances) - rows) <= 1e-5 * rows);
    });
  }
}

// Of a plan over the lists; more than none where there are rows.
int64_t products(const Batch& batch, const BlockLists& lists) {
  AttentionLists given;
  const auto count = static_cast<int64_t>(lists.lists.size() / 4);
  given.lists = {lists.lists.data(), DType::i32, {count, 4}};
  given.indptr = ints(lists.list_indptr);
  given.spans = {lists.spans.data(), DType::i32, {static_cast<int64_t>(lists.spans.size() / 2), 2}};
  return AttentionPlan(batch.geometry, batch.sequences, given).num_products();
}

TEST("lists are what a plan takes, and none costs more than all tokens") {
  std::mt19937 random(2);
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    Batch batch(random);
    const auto block = static_cast<int32_t>(1 << random() % 8);
    IndexRows all = batch.rows(block);
    all.local_tokens = 1 << 20;
    const int64_t dense = products(batch, a_shape_lists(all, pool));
    const auto check = [&](const BlockLists& lists) {
      const int64_t cost = products(batch, lists);
      CHECK(cost <= dense);
      CHECK(cost > 0 || batch.qo_indptr.back() == 0);
    };
    ColumnScores scores;
    const std::vector<float> columns =
        normals(int64_t{batch.kv_indptr.back()} * batch.geometry.num_qo_heads, random);
    scores.columns = {
        columns.data(), DType::f32, {batch.geometry.num_qo_heads, batch.kv_indptr.back()}};
    scores.slashes = scores.columns;
    scores.top_columns.count = scores.top_slashes.count = static_cast<int32_t>(random() % 9);
    check(column_lists(batch.rows(block), scores, pool));
    BlockScoreInputs inputs;
    inputs.q = batch.q;
    inputs.k = batch.k;
    inputs.top.mass = 0.5f;
    inputs.method = random() % 2 == 0 ? BlockMethod::mean : BlockMethod::antidiagonal;
    inputs.stride = std::max(1, block / 4);
    at_every_isa([&] {
      check(block_score_lists(batch.rows(block), batch.geometry, batch.sequences, inputs, pool,
                              pool));
    });
  }
}

TEST("pages are bounded, scored and listed") {
  std::mt19937 random(3);
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    Batch batch(random);
    batch.geometry.page_size = static_cast<int32_t>(1 + random() % 40);
    const Dims dims = page_bounds_dims(batch.geometry, batch.sequences);
    std::vector<float> bounds(static_cast<size_t>(dims.num_elements()));
    page_bounds(batch.geometry, batch.sequences, batch.k, KvOrder::nhd, bounds.data(), pool);
    const TensorView given = {bounds.data(), DType::f32, dims};
    const Dims pages = page_scores_dims(batch.geometry, batch.sequences);
    std::vector<float> scores(static_cast<size_t>(pages.num_elements()));
    page_scores(batch.geometry, batch.sequences, batch.q, given, scores.data(), pool);
    const TensorView view = {scores.data(), DType::f32, pages};
    CHECK(products(batch, page_lists(batch.rows(1), view, batch.geometry.page_size, {2, 0.0f},
                                     pool)) > 0 ||
          batch.qo_indptr.back() == 0);
  }
}

TEST("wrong arguments are named") {
  std::mt19937 random(4);
  ThreadPool pool(1);
  Batch batch(random);
  IndexRows rows = batch.rows(0);
  CHECK_THROWS(InvalidArgument, "[test] block_size", a_shape_lists(rows, pool));
  rows = batch.rows(64);
  rows.num_kv_heads = 0;
  CHECK_THROWS(InvalidArgument, "[test] num_kv_heads", a_shape_lists(rows, pool));
}

}  // namespace

CHECK_MAIN()
