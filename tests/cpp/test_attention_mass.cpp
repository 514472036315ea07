// Planes of sequences, beside sums in float64, at every ISA level: what attention_mass adds to
// them, and attention that counts keys by them.
#include <algorithm>
#include <cmath>
#include <random>
#include <span>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "kv_model.h"
#include "ops/attention.h"
#include "ops/attention_mass.h"
#include "ops/registry.h"

using namespace effinfer;

namespace {

constexpr int32_t kHeads = 6;
constexpr int32_t kKvHeads = 2;
constexpr int32_t kDim = 16;
constexpr float kScale = 0.4f;

struct Rows {
  int32_t step = 0;    // of the sequence in the step
  int32_t scored = 0;  // of these the last
};

// Sequences of a cache whose last rows are a step, as kernels see them.
struct Fixture {
  Fixture(DType dtype, const std::vector<int32_t>& lengths, const std::vector<Rows>& given,
          uint32_t seed)
      : model({.num_layers = 2,
               .num_kv_heads = kKvHeads,
               .head_dim = kDim,
               .dtype = dtype,
               .num_pages = 64}),
        rows(given) {
    std::mt19937 random(seed);
    for (size_t s = 0; s < lengths.size(); ++s) {
      std::vector<int32_t> tokens(static_cast<size_t>(lengths[s]));
      for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 1000);
      ids.push_back(model.create({}));
      model.feed(ids.back(), tokens);
      const auto pages = model.cache.pages(ids.back());
      kv_indices.insert(kv_indices.end(), pages.begin(), pages.end());
      kv_indptr.push_back(static_cast<int32_t>(kv_indices.size()));
      kv_len.push_back(lengths[s]);
      qo_indptr.push_back(qo_indptr.back() + rows[s].step);
    }
    q = normals(int64_t{qo_indptr.back()} * kHeads * kDim, random);
    if (dtype == DType::bf16) {  // as kernels that multiply in it have them
      for (float& x : q) x = bf16_to_f32(f32_to_bf16(x));
    }
  }

  // Of the second layer.
  ops::AttentionMassProblem problem(const std::vector<ScoredRows>& scored) const {
    ops::AttentionMassProblem p;
    p.q = q.data();
    p.q_stride = kHeads * kDim;
    p.num_qo_heads = kHeads;
    p.kv = KvCacheAccess::layers(model.cache)[1];
    p.batch.num_tokens = qo_indptr.back();
    p.batch.num_sequences = static_cast<int64_t>(ids.size());
    p.batch.qo_indptr = qo_indptr.data();
    p.batch.kv_indptr = kv_indptr.data();
    p.batch.kv_indices = kv_indices.data();
    p.batch.kv_len = kv_len.data();
    p.sm_scale = kScale;
    p.name = "mass";
    p.scored = scored.data();
    p.num_scored = static_cast<int64_t>(scored.size());
    p.first_head = kKvHeads;
    p.max_kv_len = *std::max_element(kv_len.begin(), kv_len.end());
    return p;
  }

  // Those with rows, over zeros.
  std::vector<ScoredRows> fresh_planes() {
    std::vector<ScoredRows> scored;
    ++num_planes;
    for (size_t s = 0; s < ids.size(); ++s) {
      if (rows[s].scored == 0) continue;
      const std::string name = "mass" + std::to_string(num_planes);
      model.cache.add_plane(ids[s], name);
      scored.push_back(
          {"mass", model.cache.plane(ids[s], name), static_cast<int32_t>(s), rows[s].scored});
    }
    return scored;
  }

  // What `sums` become. `bias` times the noise of the second layer is added to logits.
  std::vector<double> expected(size_t s, int32_t kv_head, const SlotPlane& noise, double bias,
                               ops::MassRule rule = {}, std::vector<double> sums = {}) const {
    sums.resize(static_cast<size_t>(kv_len[s]), 0.0);
    const auto& keys = model.sequences.at(ids[s]).rows[0][static_cast<size_t>(kKvHeads + kv_head)];
    for (int32_t back = rows[s].scored - 1; back >= 0; --back) {
      const int32_t row = qo_indptr[s + 1] - 1 - back;
      const int32_t seen = kv_len[s] - back;
      for (double& sum : sums) sum *= double{rule.decay};
      for (int32_t head = kv_head * 3; head < kv_head * 3 + 3; ++head) {
        std::vector<double> weights(static_cast<size_t>(seen));
        double total = 0.0;
        for (int32_t key = 0; key < seen; ++key) {
          double logit = 0.0;
          for (int32_t d = 0; d < kDim; ++d) {
            logit += static_cast<double>(q[static_cast<size_t>((row * kHeads + head) * kDim + d)]) *
                     keys[static_cast<size_t>(key)].k[static_cast<size_t>(d)];
          }
          logit *= kScale;
          if (noise.values != nullptr) {
            logit += bias * double{noise.values[(kKvHeads + kv_head) * noise.stride + key]};
          }
          weights[static_cast<size_t>(key)] = std::exp(logit);
          total += weights[static_cast<size_t>(key)];
        }
        for (int32_t key = 0; key < seen; ++key) {
          double& sum = sums[static_cast<size_t>(key)];
          const double p = weights[static_cast<size_t>(key)] / total;
          sum = rule.maximum ? std::max(sum, p) : sum + p;
        }
      }
    }
    return sums;
  }

  KvModel model;
  std::vector<Rows> rows;
  std::vector<SequenceId> ids;
  std::vector<int32_t> qo_indptr = {0}, kv_indptr = {0}, kv_indices, kv_len;
  std::vector<float> q;
  int num_planes = 0;
};

// A plane of random numbers.
SlotPlane random_plane(Fixture& fixture, size_t s, const std::string& name, std::mt19937& random) {
  KvCache& cache = fixture.model.cache;
  cache.add_plane(fixture.ids[s], name);
  const SlotPlane plane = cache.plane(fixture.ids[s], name);
  std::normal_distribution<float> normal;
  for (int64_t head = 0; head < plane.num_heads; ++head) {
    for (int64_t i = 0; i < plane.num_slots; ++i) {
      plane.values[head * plane.stride + i] = normal(random);
    }
  }
  return plane;
}

void check_sums(const Fixture& fixture, const std::vector<ScoredRows>& scored, double tolerance,
                double noise = 0.0) {
  for (const ScoredRows& each : scored) {
    const auto s = static_cast<size_t>(each.sequence);
    for (int32_t head = 0; head < 2 * kKvHeads; ++head) {
      const float* row = each.plane.values + head * each.plane.stride;
      // The first layer's are another node's.
      const std::vector<double> want =
          head < kKvHeads ? std::vector<double>(static_cast<size_t>(fixture.kv_len[s]), 0.0)
                          : fixture.expected(s, head - kKvHeads, each.noise, noise);
      double worst = 0.0;
      for (size_t key = 0; key < want.size(); ++key) {
        worst = std::max(worst, std::abs(row[key] - want[key]));
      }
      CHECK(worst <= tolerance * 3 * each.rows);
    }
  }
}

// Of a head's row float64 attention, where `plane` (no values: none) and `first` are added to
// logits.
std::vector<double> attend(const Fixture& fixture, size_t s, int32_t back, int32_t head,
                           const SlotPlane& plane, double first) {
  const int32_t kv_head = head / 3;
  const auto& rows = fixture.model.sequences.at(fixture.ids[s]).rows[0];
  const auto& keys = rows[static_cast<size_t>(kKvHeads + kv_head)];
  const int32_t row = fixture.qo_indptr[s + 1] - 1 - back;
  std::vector<double> out(kDim, 0.0);
  double total = 0.0;
  for (int32_t key = 0; key < fixture.kv_len[s] - back; ++key) {
    const KvRow& kv = keys[static_cast<size_t>(key)];
    double logit = 0.0;
    for (size_t d = 0; d < kDim; ++d) {
      logit += double{fixture.q[static_cast<size_t>((row * kHeads + head) * kDim) + d]} * kv.k[d];
    }
    logit *= kScale;
    if (plane.values != nullptr) {
      logit += double{plane.values[(kKvHeads + kv_head) * plane.stride + key]};
      if (key == 0) logit += first;
    }
    total += std::exp(logit);
    for (size_t d = 0; d < kDim; ++d) out[d] += std::exp(logit) * kv.v[d];
  }
  for (double& x : out) x /= total;
  return out;
}

// Attention of the rows, where `change` may change the problem.
template <class Change>
std::vector<float> run_attention(const Fixture& fixture, int threads, Change&& change) {
  ThreadPool pool(threads);
  const ops::AttentionMassProblem of_rows = fixture.problem({});
  ops::AttentionProblem p;
  p.q = {reinterpret_cast<const uint8_t*>(of_rows.q), DType::f32, kDim, of_rows.q_stride, kDim};
  p.num_qo_heads = kHeads;
  p.num_kv_heads = kKvHeads;
  p.k = ops::keys_of(of_rows.kv);
  p.v = ops::values_of(of_rows.kv);
  p.batch = of_rows.batch;
  p.sm_scale = kScale;
  p.first_plane_head = kKvHeads;
  ops::AttentionWork work;
  ops::plan_attention({ops::KeySource::pages, kHeads, kKvHeads, kDim, true, -1, 0}, p.batch, work);
  std::vector<float> partial_out(static_cast<size_t>(work.num_partials * kDim));
  std::vector<float> partial_ms(static_cast<size_t>(work.num_partials * 2));
  std::vector<int32_t> done(work.merges.size());
  std::vector<float> out(fixture.q.size());
  p.work = work;
  p.partial_out = partial_out.data();
  p.partial_ms = partial_ms.data();
  p.done = done.data();
  p.out = reinterpret_cast<uint8_t*>(out.data());
  p.out_stride = kHeads * kDim;
  change(p);
  ops::run_alone(p, pool);
  return out;
}

std::vector<float> run_weighted(const Fixture& fixture, const std::vector<WeightedSlots>& weighted,
                                const std::vector<float>& first, int threads) {
  std::vector<ops::SlotWeights> by_sequence(fixture.ids.size());
  for (const WeightedSlots& each : weighted) {
    by_sequence[static_cast<size_t>(each.sequence)] = {each.plane.values, each.plane.stride};
  }
  return run_attention(fixture, threads, [&](ops::AttentionProblem& p) {
    p.weights = "counts";
    p.weighted = by_sequence.data();
    if (!first.empty()) p.first_logits = first.data();
  });
}

void check_same_planes(const std::vector<ScoredRows>& a, const std::vector<ScoredRows>& b) {
  for (size_t s = 0; s < a.size(); ++s) {
    const SlotPlane& x = a[s].plane;
    const SlotPlane& y = b[s].plane;
    for (int64_t i = 0; i < x.num_heads * x.stride; ++i) CHECK_EQ(x.values[i], y.values[i]);
  }
}

void check_weighted(const Fixture& fixture, const std::vector<WeightedSlots>& weighted,
                    const std::vector<float>& first) {
  const std::vector<float> out = run_weighted(fixture, weighted, first, 1);
  CHECK(out == run_weighted(fixture, weighted, first, 3));
  double worst = 0.0;
  for (size_t s = 0; s < fixture.ids.size(); ++s) {
    SlotPlane plane;
    for (const WeightedSlots& each : weighted) {
      if (each.sequence == static_cast<int32_t>(s)) plane = each.plane;
    }
    for (int32_t row = fixture.qo_indptr[s]; row < fixture.qo_indptr[s + 1]; ++row) {
      for (int32_t head = 0; head < kHeads; ++head) {
        const double extra = first.empty() ? 0.0 : first[static_cast<size_t>(head)];
        const std::vector<double> want =
            attend(fixture, s, fixture.qo_indptr[s + 1] - 1 - row, head, plane, extra);
        for (size_t d = 0; d < kDim; ++d) {
          const float got = out[static_cast<size_t>((row * kHeads + head) * kDim) + d];
          worst = std::max(worst, std::abs(got - want[d]));
        }
      }
    }
  }
  // Means of values below 5, whose weights are off by the rounding of logits below 20.
  CHECK(worst <= 1e-4);
}

}  // namespace

TEST("planes get the probabilities of the rows that are asked for") {
  ThreadPool pool(2);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const bool by_row : {false, true}) {
      Fixture fixture(dtype, {300, 1, 64, 129, 90, 200},
                      {{80, 70}, {1, 1}, {64, 3}, {1, 1}, {5, 0}, {130, 130}}, 5);
      at_every_isa([&] {
        const std::vector<ScoredRows> scored = fixture.fresh_planes();
        ops::AttentionMassProblem problem = fixture.problem(scored);
        problem.by_row = by_row;
        ops::run_alone(problem, pool);
        // Logits of 16 products of numbers below 4, and as many exponentials as keys.
        check_sums(fixture, scored, 1e-5);
      });
    }
  }
}

TEST("planes hold maxima, and sums that decay, over several steps") {
  ThreadPool pool(2);
  for (const ops::MassRule rule : {ops::MassRule{1.0f, true}, ops::MassRule{0.875f, false},
                                   ops::MassRule{0.5f, true}, ops::MassRule{0.0f, false}}) {
    for (const bool by_row : {false, true}) {
      Fixture fixture(DType::f32, {300, 1, 64}, {{80, 70}, {1, 1}, {64, 3}}, 5);
      at_every_isa([&] {
        const std::vector<ScoredRows> scored = fixture.fresh_planes();
        ops::AttentionMassProblem problem = fixture.problem(scored);
        problem.by_row = by_row;
        problem.rule = rule;
        for (int step = 0; step < 2; ++step) ops::run_alone(problem, pool);
        for (const ScoredRows& each : scored) {
          const auto s = static_cast<size_t>(each.sequence);
          for (int32_t head = 0; head < kKvHeads; ++head) {
            const float* row = each.plane.values + (kKvHeads + head) * each.plane.stride;
            std::vector<double> want;
            for (int step = 0; step < 2; ++step) {
              want = fixture.expected(s, head, {}, 0.0, rule, want);
            }
            for (size_t key = 0; key < want.size(); ++key) {
              CHECK(std::abs(row[key] - want[key]) <= 1e-5 * 6 * each.rows);
            }
          }
        }
      });
    }
  }
}

TEST("noise of keys is added to the logits that are summed") {
  ThreadPool pool(2);
  std::mt19937 random(8);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Fixture fixture(dtype, {200, 1, 65}, {{80, 70}, {1, 1}, {3, 3}}, 5);
    std::vector<SlotPlane> noise;
    for (const size_t s : {size_t{0}, size_t{1}})
      noise.push_back(random_plane(fixture, s, "noise", random));
    at_every_isa([&] {
      std::vector<ScoredRows> scored = fixture.fresh_planes();
      scored[0].noise = noise[0];
      scored[1].noise = noise[1];
      ops::AttentionMassProblem problem = fixture.problem(scored);
      problem.noise = 0.7f;
      ops::run_alone(problem, pool);
      check_sums(fixture, scored, 1e-5, double{problem.noise});
    });
  }
}

TEST("attention counts keys by a plane, and the first one by its head's factor") {
  std::mt19937 random(9);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    // Prompts, generated tokens, more keys than one chunk has; the third has no numbers.
    Fixture fixture(dtype, {700, 1, 129, 64, 300}, {{80, 0}, {1, 0}, {70, 0}, {1, 0}, {1, 0}}, 5);
    std::vector<WeightedSlots> weighted;
    for (const int32_t s : {0, 1, 3, 4}) {
      weighted.push_back(
          {"counts", random_plane(fixture, static_cast<size_t>(s), "counts", random), s});
    }
    const std::vector<float> first = normals(kHeads, random);
    for (const bool tunes : {false, true}) {
      at_every_isa(
          [&] { check_weighted(fixture, weighted, tunes ? first : std::vector<float>()); });
    }
  }
}

TEST("rows of several steps give the bits of one, row by row and for any team") {
  Fixture whole(DType::bf16, {150}, {{7, 7}}, 6);
  at_every_isa([&] {
    std::vector<std::vector<ScoredRows>> results;
    for (const int threads : {1, 3}) {
      ThreadPool pool(threads);
      results.push_back(whole.fresh_planes());
      ops::AttentionMassProblem problem = whole.problem(results.back());
      problem.by_row = true;
      ops::run_alone(problem, pool);
    }
    ThreadPool pool(1);
    results.push_back(whole.fresh_planes());
    for (int32_t row = 0; row < 7; ++row) {
      std::vector<ScoredRows> one = results.back();
      one[0].rows = 1;
      ops::AttentionMassProblem problem = whole.problem(one);
      const std::vector<int32_t> qo_indptr = {0, 1}, kv_len = {144 + row};
      problem.q += row * problem.q_stride;
      problem.batch.num_tokens = 1;
      problem.batch.qo_indptr = qo_indptr.data();
      problem.batch.kv_len = kv_len.data();
      problem.by_row = true;
      ops::run_alone(problem, pool);
    }
    for (const auto& other : results) check_same_planes(results[0], other);
  });
}

TEST("attention that keeps weights gives the bits of a call, and its own") {
  // Tokens alone in their sequence, of fewer keys than a page and of more than a chunk, beside a
  // prompt and a token that nobody asks for.
  const std::vector<int32_t> lengths = {700, 1, 300, 64, 129, 90, 1500};
  const std::vector<Rows> rows = {{1, 1}, {1, 1}, {40, 0}, {1, 1}, {1, 1}, {1, 0}, {1, 1}};
  constexpr int64_t kPages = ops::KeptWeights::rounded(24);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i8}) {
    Fixture fixture(dtype, lengths, rows, 5);
    const ops::MassRule rule = {dtype == DType::f16 ? 0.5f : 1.0f, dtype == DType::i8};
    at_every_isa([&] {
      ThreadPool pool(2);
      const std::vector<ScoredRows> called = fixture.fresh_planes();
      ops::AttentionMassProblem call = fixture.problem(called);
      call.by_row = true;
      call.rule = rule;
      ops::run_alone(call, pool);
      const std::vector<float> plain = run_attention(fixture, 2, [](ops::AttentionProblem&) {});
      for (const int threads : {1, 3}) {
        std::vector<ScoredRows> kept = fixture.fresh_planes();
        kept[0].name = "another node's";
        const int64_t heads = std::ssize(kept) * kKvHeads;
        constexpr int64_t kGroup = kHeads / kKvHeads;
        const int64_t room = heads * kPages * ops::KeptWeights::page_weights(kGroup);
        const int64_t count = heads * ops::KeptWeights::row_numbers(kGroup, kPages);
        std::vector<float> numbers(static_cast<size_t>(count));
        std::vector<float> weights(static_cast<size_t>(threads * room));
        const ops::KeptWeights memory = {numbers.data(), kPages, weights.data(), room};
        const auto keep = [&](ops::AttentionProblem& p) {
          p.mass = "mass";
          p.scored = kept.data();
          p.num_scored = static_cast<int64_t>(kept.size());
          p.kept = memory;
        };
        const auto sum_kept = [&] {
          ThreadPool team(threads);
          ops::AttentionMassProblem sums = fixture.problem(kept);
          sums.rule = rule;
          sums.kept = memory;
          ops::run_alone(sums, team);
        };
        CHECK(run_attention(fixture, threads, keep) == plain);
        sum_kept();
        const SlotPlane& untouched = kept[0].plane;
        for (int64_t i = 0; i < untouched.num_heads * untouched.stride; ++i) {
          CHECK_EQ(untouched.values[i], 0.0f);
        }
        kept[0].name = "mass";
        for (ScoredRows& each : std::span(kept).subspan(1)) each.name = "";
        run_attention(fixture, threads, keep);
        sum_kept();
        check_same_planes(kept, called);
      }
    });
  }
}

TEST("rows of another name are left to another node") {
  ThreadPool pool(1);
  Fixture fixture(DType::f32, {40}, {{4, 4}}, 7);
  const std::vector<ScoredRows> scored = fixture.fresh_planes();
  ops::AttentionMassProblem problem = fixture.problem(scored);
  problem.name = "other";
  ops::run_alone(problem, pool);
  const SlotPlane& plane = scored[0].plane;
  for (int64_t i = 0; i < plane.num_heads * plane.stride; ++i) CHECK_EQ(plane.values[i], 0.0f);
}

CHECK_MAIN()
