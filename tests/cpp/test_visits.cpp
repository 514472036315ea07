// Sparse prefill over pages, on random batches at every ISA level: attention over random lists
// against plain loops, and lists that every method makes of them, within their memory.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "effinfer/error.h"
#include "effinfer/ops/attention.h"
#include "effinfer/ops/visits.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;

// Sequences of random lengths in pages of their own, with all their keys appended.
struct Batch {
  Batch(std::mt19937& random, DType dtype) {
    const int32_t shapes[][3] = {{1, 1, 16}, {6, 2, 48}, {4, 1, 64}, {9, 1, 32}};
    const auto& [qo, kv_heads, d] = shapes[random() % 4];
    heads = qo;
    dim = d;
    for (int32_t s = 0; s < 3; ++s) {
      const auto length = static_cast<int32_t>(1 + random() % 700);
      kv_len.push_back(length);
      const auto rows = static_cast<int32_t>(1 + random() % static_cast<unsigned>(length));
      qo_indptr.push_back(qo_indptr.back() + std::min(rows, 150));
      whole.push_back(whole.back() + length);
      const int32_t pages = (length + 63) / 64;
      for (int32_t i = 0; i < pages; ++i) kv_indices.push_back(kv_indptr.back() + i);
      kv_indptr.push_back(kv_indptr.back() + pages);
    }
    std::shuffle(kv_indices.begin(), kv_indices.end(), random);
    kv = std::make_unique<PagedKv>(kv_indptr.back(), kv_heads, dim, dtype);
    const Dims shape = {whole.back(), kv_heads, dim};
    const std::vector<float> k = normals(shape.num_elements(), random);
    const std::vector<float> v = normals(shape.num_elements(), random);
    const PagedBatch all = {ints(whole), ints(kv_indptr), ints(kv_indices), ints(kv_len)};
    kv_append(*kv, {k.data(), DType::f32, shape}, {v.data(), DType::f32, shape}, all, pool);
    q_data = normals(int64_t{qo_indptr.back()} * heads * dim, random);
    q = {q_data.data(), DType::f32, {qo_indptr.back(), heads, dim}};
    batch = {ints(qo_indptr), ints(kv_indptr), ints(kv_indices), ints(kv_len)};
  }

  int32_t heads = 0, dim = 0;
  std::vector<int32_t> qo_indptr = {0}, whole = {0}, kv_indptr = {0}, kv_indices, kv_len;
  std::vector<float> q_data;
  ThreadPool pool{2};
  std::unique_ptr<PagedKv> kv;
  TensorView q;
  PagedBatch batch;
};

// Whether a row of a sequence visits a token: by the list of its block, if there is one.
bool visits_token(Visits& visits, int64_t sequence, int64_t row, int64_t kv_head, int64_t token) {
  const std::vector<int32_t> blocks = visits.blocks();
  for (size_t b = 0; b < blocks.size() / 4; ++b) {
    const int32_t* block = blocks.data() + 4 * b;
    if (block[0] != sequence || row < block[1] || row >= block[1] + block[2]) continue;
    const int64_t list = static_cast<int64_t>(b) * visits.num_kv_heads() + kv_head;
    return visits.words()[list * visits.list_words() + token / 64] >> token % 64 & 1;
  }
  return true;
}

// One row and head, in double.
std::vector<double> attend(const Batch& b, Visits& visits, int64_t s, int64_t row, int64_t head,
                           const std::vector<float>& k, const std::vector<float>& v) {
  const size_t sequence = static_cast<size_t>(s);
  const int64_t kv_heads = b.kv->num_kv_heads(), kv_head = head / (b.heads / kv_heads);
  const int64_t position = b.kv_len[sequence] - (b.qo_indptr[sequence + 1] - row);
  const float* q = b.q_data.data() + (row * b.heads + head) * b.dim;
  std::vector<double> out(static_cast<size_t>(b.dim)), scores;
  std::vector<const float*> values;
  double highest = -std::numeric_limits<double>::infinity();
  for (int64_t t = 0; t <= position; ++t) {
    if (!visits_token(visits, s, row, kv_head, t)) continue;
    const int64_t page = b.kv_indices[static_cast<size_t>(b.kv_indptr[sequence] + t / 64)];
    const int64_t at = ((page * kv_heads + kv_head) * 64 + t % 64) * b.dim;
    double score = 0.0;
    for (int64_t d = 0; d < b.dim; ++d) score += double{q[d]} * k[static_cast<size_t>(at + d)];
    scores.push_back(score * 0.2);
    values.push_back(v.data() + at);
    highest = std::max(highest, scores.back());
  }
  double sum = 0.0;
  for (size_t i = 0; i < scores.size(); ++i) {
    const double p = std::exp(scores[i] - highest);
    sum += p;
    for (size_t d = 0; d < out.size(); ++d) out[d] += p * values[i][d];
  }
  for (double& x : out) x = sum > 0 ? x / sum : 0.0;
  return out;
}

TEST("attention visits what random lists have") {
  std::mt19937 random(1);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i8}) {
    Batch b(random, dtype);
    Visits visits(b.batch, b.heads, b.kv->num_kv_heads());
    const int64_t words = visits.num_blocks() * b.kv->num_kv_heads() * visits.list_words();
    for (int64_t i = 0; i < words; ++i) {
      const uint64_t bits = uint64_t{random()} << 32 | random();
      const uint64_t kinds[] = {0, bits & bits >> 7 & bits >> 13, bits, ~uint64_t{0}};
      visits.words()[i] = kinds[random() % 4];
    }
    const size_t pages = static_cast<size_t>(b.kv->num_pages()) * 64 *
                         static_cast<size_t>(b.kv->num_kv_heads() * b.dim);
    std::vector<float> k(pages), v(pages), out(b.q_data.size());
    b.kv->read(k.data(), v.data());
    PagedAttentionOptions options;
    options.sm_scale = 0.2f;
    options.visits = &visits;
    at_every_isa([&] {
      paged_attention(b.q, *b.kv, b.batch, options, out.data(), b.pool);
      for (int i = 0; i < 40; ++i) {
        const int64_t s = random() % 3, head = random() % static_cast<unsigned>(b.heads);
        const auto& indptr = b.qo_indptr;
        const auto at = static_cast<size_t>(s);
        const auto rows = static_cast<unsigned>(indptr[at + 1] - indptr[at]);
        const int64_t row = indptr[at] + static_cast<int64_t>(random() % rows);
        const std::vector<double> expected = attend(b, visits, s, row, head, k, v);
        for (int64_t d = 0; d < b.dim; ++d) {
          const float got = out[static_cast<size_t>((row * b.heads + head) * b.dim + d)];
          CHECK(std::abs(got - expected[static_cast<size_t>(d)]) < 1e-4);
        }
      }
    });
  }
}

// Own rows, the first keys and the nearest ones, whatever else.
void check_always(Visits& visits, int32_t sink_tokens, int32_t local_tokens) {
  const std::vector<int32_t> blocks = visits.blocks();
  CHECK(!blocks.empty());
  for (size_t b = 0; b < blocks.size() / 4; ++b) {
    const int32_t* block = blocks.data() + 4 * b;
    const int32_t end = block[3] + block[2];
    for (int32_t head = 0; head < visits.num_kv_heads(); ++head) {
      for (int32_t t = 0; t < end; ++t) {
        if (t >= sink_tokens && t < block[3] - local_tokens + 1) continue;
        CHECK(visits_token(visits, block[0], block[1], head, t));
      }
    }
  }
}

TEST("every method writes lists within their memory") {
  std::mt19937 random(2);
  for (const DType dtype : {DType::f32, DType::bf16, DType::i8}) {
    Batch b(random, dtype);
    Visits visits(b.batch, b.heads, b.kv->num_kv_heads());
    VisitOptions options{0.2f, 5, 33, 0};
    const auto check_methods = [&] {
      for (const int32_t stride : {0, 4, 8, 16, 32, 64}) {
        block_visits(visits, b.q, *b.kv, b.batch, {stride, {2, 0.0f}}, options, b.pool);
        check_always(visits, 5, 33);
        block_visits(visits, b.q, *b.kv, b.batch, {stride, {0, 1.0f}}, options, b.pool);
        block_visits(visits, b.q, *b.kv, b.batch, {stride, {}, stride == 0, 130, 0.3f}, options,
                     b.pool);
        check_always(visits, 5, 33);
      }
      const ColumnVisits methods[] = {{64, 0, {10, 0.0f}, {10, 0.0f}},
                                      {200, 0, {5000, 0.0f}, {0, 1.0f}},
                                      {1, 7, {0, 0.5f}, {0, 0.0f}}};
      for (const ColumnVisits& method : methods) {
        column_visits(visits, b.q, *b.kv, b.batch, method, options, b.pool);
        check_always(visits, 5, 33);
      }
    };
    at_every_isa([&] {
      options.arithmetic = DType::f32;
      check_methods();
      if (dtype != DType::bf16 || current_isa() < Isa::avx512 || !cpu_features().avx512_bf16)
        return;
      options.arithmetic = DType::bf16;
      check_methods();
    });
  }
}

TEST("lists of other sequences are refused") {
  std::mt19937 random(3);
  Batch b(random, DType::f32);
  Batch other(random, DType::f32);
  Visits visits(other.batch, other.heads, other.kv->num_kv_heads());
  PagedAttentionOptions options;
  options.visits = &visits;
  std::vector<float> out(b.q_data.size());
  CHECK_THROWS(InvalidArgument, "visits: expected lists of this batch",
               paged_attention(b.q, *b.kv, b.batch, options, out.data(), b.pool));
}

}  // namespace

CHECK_MAIN()
