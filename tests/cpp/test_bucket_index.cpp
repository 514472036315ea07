// bucket_index beside plain loops in float64, list by list and weight by weight, at every ISA
// level; and that over seeds the sums of what is drawn are those over all keys, as exactly as their
// variance says.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "core/philox.h"
#include "effinfer/ops/attention.h"
#include "ops/bucket_index.h"
#include "ops/paged_batch.h"
#include "ops/registry.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;

constexpr int32_t kKvHeads = 2;
constexpr int32_t kDim = 32;
constexpr int32_t kMost = 1500;

// What bfloat16 has exactly, and int8 where the greatest of a row is 127 / 16.
std::vector<float> sixteenths(int64_t count, std::mt19937& random) {
  std::vector<float> values = normals(count, random);
  for (float& x : values) x = std::round(x * 16.0f) / 16.0f;
  return values;
}

using Ints = std::vector<int32_t>;

struct Texts {
  Texts(const Ints& lengths, const Ints& rows, DType dtype, int32_t query_heads = 3)
      : kv_len(lengths), group(query_heads), buffers(shape(heads), 3000, 8, kMost) {
    std::mt19937 random(7);
    for (size_t s = 0; s < kv_len.size(); ++s) {
      qo_indptr.push_back(qo_indptr.back() + rows[s]);
      whole.push_back(whole.back() + kv_len[s]);
      const int32_t pages = (kv_len[s] + 63) / 64;
      for (int32_t i = 0; i < pages; ++i) kv_indices.push_back(kv_indptr.back() + i);
      kv_indptr.push_back(kv_indptr.back() + pages);
    }
    std::shuffle(kv_indices.begin(), kv_indices.end(), random);
    kv = std::make_unique<PagedKv>(kv_indptr.back(), kKvHeads, kDim, dtype);
    const Dims dims = {whole.back(), kKvHeads, kDim};
    k = sixteenths(dims.num_elements(), random);
    for (size_t i = 0; i < k.size(); ++i) {
      k[i] += i % kDim < 5 ? 2.0f : 0.0f;  // a mean to lose
      if (dtype == DType::i8) k[i] = i % kDim == 9 ? 127.0f / 16.0f : std::min(k[i], 7.0f);
    }
    v = sixteenths(dims.num_elements(), random);
    const PagedBatch all = {ints(whole), ints(kv_indptr), ints(kv_indices), ints(kv_len)};
    kv_append(*kv, {k.data(), DType::f32, dims}, {v.data(), DType::f32, dims}, all, pool);
    q = normals(int64_t{qo_indptr.back()} * heads * kDim, random);
    planes = hash_planes(kBucketPlanes, kDim, 11);
    batch.num_tokens = qo_indptr.back();
    batch.num_sequences = static_cast<int64_t>(kv_len.size());
    batch.qo_indptr = qo_indptr.data();
    batch.kv_indptr = kv_indptr.data();
    batch.kv_indices = kv_indices.data();
    batch.kv_len = kv_len.data();
  }
  static VisitShape shape(int32_t heads) {
    VisitShape shape;
    shape.num_qo_heads = heads;
    shape.num_kv_heads = kKvHeads;
    shape.block_weights = true;
    return shape;
  }

  BucketIndexProblem problem() const {
    BucketIndexProblem p;
    p.q = q.data();
    p.q_stride = heads * kDim;
    p.num_qo_heads = heads;
    p.kv = layer_of(*kv);
    p.batch = batch;
    p.planes = planes.data();
    p.heads = indexed.data();
    p.max_kv_len = kMost;
    return p;
  }
  const VisitPlan& choose(BucketIndexProblem& p) {
    p.visits = plan = buffers.plan(batch);
    run_alone(p, pool);
    return plan;
  }

  const float* key(int32_t sequence, int64_t token, int64_t head) const {
    return k.data() + ((whole[static_cast<size_t>(sequence)] + token) * kKvHeads + head) * kDim;
  }
  const float* value(int32_t sequence, int64_t token, int64_t head) const {
    return v.data() + ((whole[static_cast<size_t>(sequence)] + token) * kKvHeads + head) * kDim;
  }
  const float* query(int64_t row, int64_t head) const {
    return q.data() + (row * heads + head) * kDim;
  }

  std::vector<int32_t> kv_len, qo_indptr = {0}, whole = {0}, kv_indptr = {0}, kv_indices;
  std::vector<float> k, v, q, planes;
  std::vector<IndexedHead> indexed = std::vector<IndexedHead>(kKvHeads, IndexedHead::chosen);
  std::unique_ptr<PagedKv> kv;
  int32_t group;  // query heads of a KV head
  int32_t heads = kKvHeads * group;
  BatchLayout batch;
  VisitBuffers buffers;
  VisitPlan plan;
  ThreadPool pool{2};
};

// How often each key counts: 0 where it is not visited.
using Counts = std::vector<double>;

Counts counts_of(const VisitPlan& plan, int64_t block, int64_t head, int64_t tokens) {
  Counts counts(static_cast<size_t>(tokens));
  const bool weighted = plan.weighted[block * kKvHeads + head] != 0;
  for (int64_t t = 0; t < tokens; ++t) {
    if ((plan.list(block, head)[t / 64] >> t % 64 & 1) == 0) continue;
    const float weight = weighted ? plan.list_weights(block, head)[t] : 0.0f;
    counts[static_cast<size_t>(t)] = std::exp(double{weight});
  }
  return counts;
}

int bucket_of(const BucketIndexProblem& p, const float* x, const std::vector<double>& mean) {
  int bucket = 0;
  for (int bit = 0; bit < p.bits; ++bit) {
    double sum = 0.0;
    for (size_t d = 0; d < kDim; ++d) sum += (double{x[d]} - mean[d]) * p.planes[bit * kDim + d];
    bucket |= int{sum > 0.0} << bit;
  }
  return bucket;
}

// A block's candidates in the order in which they are taken.
struct Ranked {
  int64_t first = 64, end = 0;
  std::vector<int64_t> tokens;
};

Ranked rank(const Texts& texts, const BucketIndexProblem& p, const VisitBlock& block,
            int64_t head) {
  Ranked ranked;
  while (ranked.first < p.sink_tokens) ranked.first += 64;
  const int64_t local = block.position + 1 - std::max(p.local_tokens, 1);
  ranked.end = local < 0 ? 0 : local / 64 * 64;
  const bool few = ranked.end - ranked.first <= p.keys + p.samples;
  if (few || block.position + block.num_rows < p.min_tokens) return ranked;
  std::vector<double> mean(kDim), none(kDim);
  const int64_t keys = 64 * std::min(8, (p.keys + p.samples) / 64 + 1);
  for (int64_t t = ranked.first; t < ranked.first + keys; ++t) {
    for (size_t d = 0; d < kDim; ++d) {
      mean[d] += double{texts.key(block.sequence, t, head)[d]} / static_cast<double>(keys);
    }
  }
  std::vector<int64_t> near(size_t{1} << p.bits);
  for (int32_t row = block.first_row; row < block.first_row + block.num_rows; ++row) {
    for (int64_t i = 0; i < texts.group; ++i) {
      const int bucket = bucket_of(p, texts.query(row, head * texts.group + i), none);
      for (size_t b = 0; b < near.size(); ++b) {
        const int differ = std::popcount(static_cast<unsigned>(bucket) ^ static_cast<unsigned>(b));
        near[b] += int64_t{1} << 2 * (p.bits - differ);
      }
    }
  }
  std::vector<size_t> order(near.size()), place(near.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return near[a] > near[b]; });
  for (size_t i = 0; i < order.size(); ++i) place[order[i]] = i;
  std::vector<size_t> places(static_cast<size_t>(ranked.end));
  for (int64_t t = ranked.end - 1; t >= ranked.first; --t) {
    const auto token = static_cast<size_t>(t);
    places[token] =
        place[static_cast<size_t>(bucket_of(p, texts.key(block.sequence, t, head), mean))];
    ranked.tokens.push_back(t);
  }
  std::ranges::stable_sort(ranked.tokens, [&](int64_t a, int64_t b) {
    return places[static_cast<size_t>(a)] < places[static_cast<size_t>(b)];
  });
  return ranked;
}

// Of the rest, in the order of the text.
std::vector<int64_t> rest_of(const BucketIndexProblem& p, const Ranked& ranked) {
  std::vector<int64_t> rest(ranked.tokens.begin() + p.keys, ranked.tokens.end());
  std::ranges::sort(rest);
  return rest;
}

int64_t run_begin(const BucketIndexProblem& p, const std::vector<int64_t>& rest, int64_t run) {
  return run * static_cast<int64_t>(rest.size()) / p.samples;
}

Counts expected(const Texts& texts, const BucketIndexProblem& p, const VisitBlock& block,
                int64_t head) {
  Counts counts(static_cast<size_t>(block.position + block.num_rows), 1.0);
  const Ranked ranked = rank(texts, p, block, head);
  if (ranked.tokens.empty()) return counts;
  const std::vector<int64_t> rest = rest_of(p, ranked);
  for (const int64_t t : rest) counts[static_cast<size_t>(t)] = 0.0;
  for (int64_t run = 0; run < p.samples; ++run) {
    const int64_t begin = run_begin(p, rest, run);
    const auto length = static_cast<double>(run_begin(p, rest, run + 1) - begin);
    const auto number = 0x80000000u | static_cast<uint32_t>(p.layer * kKvHeads + head);
    const double u = philox_uniform(p.seed, static_cast<uint64_t>(run + 1),
                                    static_cast<uint32_t>(block.position), number);
    counts[static_cast<size_t>(
        rest[static_cast<size_t>(begin + static_cast<int64_t>(u * length))])] = length;
  }
  return counts;
}

TEST("lists and weights are those of plain loops") {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i8}) {
    // The last one's last page has one token.
    Texts texts({1500, 64, 1031, 900, 30, 961}, {1300, 64, 130, 500, 30, 64}, dtype,
                dtype == DType::i8 ? 1 : 3);
    for (int turn = 0; turn < 6; ++turn) {
      BucketIndexProblem p = texts.problem();
      p.bits = 8 - turn;
      p.keys = turn == 4 ? 0 : 100 + 37 * turn;
      p.samples = turn == 5 ? 0 : 10 + 53 * turn;
      p.sink_tokens = 40 * turn;
      p.local_tokens = turn * 30;
      p.min_tokens = turn == 3 ? 1000 : 0;
      p.seed = static_cast<uint64_t>(turn) << 31;
      p.layer = turn;
      at_every_isa([&] {
        const VisitPlan& plan = texts.choose(p);
        CHECK_EQ(plan.num_blocks, int64_t{21 + 1 + 3 + 8 + 1});
        int64_t left_out = 0;
        for (int64_t i = 0; i < plan.num_blocks; ++i) {
          const VisitBlock& block = plan.blocks[i];
          for (int64_t head = 0; head < kKvHeads; ++head) {
            const Counts want = expected(texts, p, block, head);
            const Counts got = counts_of(plan, i, head, static_cast<int64_t>(want.size()));
            for (size_t t = 0; t < want.size(); ++t) {
              CHECK(std::abs(got[t] - want[t]) <= 1e-5 * want[t]);
              left_out += want[t] == 0.0 ? 1 : 0;
            }
          }
        }
        CHECK(left_out > 2000);
      });
    }
  }
}

// The sums of a row and head over keys before the block, and what their draws vary by.
TEST("over seeds the sums are those over all keys, as exactly as their variance says") {
  constexpr int kSeeds = 1000;
  Texts texts({1280}, {64}, DType::f32);
  BucketIndexProblem p = texts.problem();
  p.keys = 128;
  p.samples = 64;
  std::vector<Counts> drawn;
  for (int seed = 0; seed < kSeeds; ++seed) {
    p.seed = static_cast<uint64_t>(seed);
    drawn.push_back(counts_of(texts.choose(p), 0, 1, 1216));
  }
  const VisitBlock block = texts.plan.blocks[0];
  CHECK_EQ(block.position, 1216);
  const std::vector<int64_t> rest = rest_of(p, rank(texts, p, block, 1));
  CHECK_EQ(rest.size(), size_t{1216 - 64 - 128});
  for (int64_t row = 0; row < 64; row += 9) {
    const float* q = texts.query(row, texts.group);
    for (int32_t column = -1; column < kDim; column += 3) {  // -1: exponentials alone
      std::vector<double> terms;
      for (int64_t t = 0; t < 1216; ++t) {
        const float* k = texts.key(0, t, 1);
        double logit = 0.0;
        for (int32_t d = 0; d < kDim; ++d) logit += 0.17 * double{q[d]} * double{k[d]};
        const double value = column < 0 ? 1.0 : double{texts.value(0, t, 1)[column]};
        terms.push_back(std::exp(logit) * value);
      }
      const double exact = std::accumulate(terms.begin(), terms.end(), 0.0);
      double variance = 0.0;
      for (int64_t run = 0; run < p.samples; ++run) {
        double sum = 0.0, squares = 0.0;
        const int64_t begin = run_begin(p, rest, run), end = run_begin(p, rest, run + 1);
        for (int64_t i = begin; i < end; ++i) {
          const double term = terms[static_cast<size_t>(rest[static_cast<size_t>(i)])];
          sum += term;
          squares += term * term;
        }
        variance += static_cast<double>(end - begin) * squares - sum * sum;
      }
      double mean = 0.0, spread = 0.0;
      for (const Counts& counts : drawn) {
        const double sum =
            std::inner_product(terms.begin(), terms.end(), counts.begin(), 0.0) - exact;
        mean += sum / kSeeds;
        spread += sum * sum / kSeeds;
      }
      // Five standard errors of a mean; weights are logarithms in float32.
      const double rounding = 1e-5 * std::abs(exact);
      CHECK(std::abs(mean) < 5.0 * std::sqrt(variance / kSeeds) + rounding);
      CHECK(spread > 0.5 * variance && spread < 2.0 * variance);
    }
  }
}

TEST("counts of more keys than there are visit all of them") {
  constexpr int32_t kHuge = std::numeric_limits<int32_t>::max();
  Texts texts({1300}, {200}, DType::f32);
  for (int32_t BucketIndexProblem::* count :
       {&BucketIndexProblem::keys, &BucketIndexProblem::samples, &BucketIndexProblem::sink_tokens,
        &BucketIndexProblem::local_tokens, &BucketIndexProblem::min_tokens}) {
    BucketIndexProblem p = texts.problem();
    p.samples = 1;
    CHECK_EQ(texts.choose(p).weighted[0], 1);
    p.*count = kHuge;
    if (count != &BucketIndexProblem::keys) p.keys = 1;
    const VisitPlan& plan = texts.choose(p);
    for (int64_t i = 0; i < plan.num_blocks * kKvHeads; ++i) CHECK_EQ(plan.weighted[i], 0);
    for (int64_t word = 0; word < 18; ++word) CHECK_EQ(plan.list(0, 1)[word], ~uint64_t{0});
  }
}

TEST("heads of other indices stay as they are, and dense ones visit all keys") {
  Texts texts({900}, {200}, DType::f32);
  texts.indexed = {IndexedHead::other, IndexedHead::dense};
  BucketIndexProblem p = texts.problem();
  p.samples = 32;
  const VisitPlan before = texts.buffers.plan(texts.batch);
  for (int64_t word = 0; word < 12; ++word) before.list(0, 0)[word] = 0x5555;
  const VisitPlan& plan = texts.choose(p);
  for (int64_t word = 0; word < 12; ++word) {
    CHECK_EQ(plan.list(0, 0)[word], uint64_t{0x5555});
    CHECK_EQ(plan.list(0, 1)[word], ~uint64_t{0});
  }
  CHECK_EQ(plan.weighted[0], 0);
  CHECK_EQ(plan.weighted[1], 0);
}

TEST("what is drawn is the seed's, the layer's, the head's and the block's") {
  Texts texts({1300}, {128}, DType::f32);
  BucketIndexProblem p = texts.problem();
  p.samples = 40;
  const auto drawn = [&](int64_t block, int64_t head) {
    return counts_of(texts.choose(p), block, head, 1100);
  };
  const Counts first = drawn(0, 0);
  CHECK(drawn(0, 0) == first);
  CHECK(drawn(0, 1) != first);
  CHECK(drawn(1, 0) != first);
  p.layer = 1;
  CHECK(drawn(0, 0) != first);
  p.layer = 0;
  p.seed = 1;
  CHECK(drawn(0, 0) != first);
}

}  // namespace

CHECK_MAIN()
