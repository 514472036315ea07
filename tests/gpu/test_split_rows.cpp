// Drawing from rows that several blocks share: the CPU's tokens, and what becomes of a filter.
#include <algorithm>
#include <random>

#include "gpu/drawn_rows.h"
#include "gpu/paths.h"

namespace effinfer {
namespace {

using cuda::RowPlan;

TEST("the CPU's tokens, whatever the filters and lengths") {
  check_samples({8193, 9004, 17003, 33000}, 2, kEveryValue ? 5 : 20, Split::parts, 11);
}

struct Planned {
  Filters filters;
  RowPlan plan;
};

// Which filters end in a list, and do not go the long way that gives the same tokens.
TEST("where a filter of a long row ends is known from few values") {
  const Planned cases[] = {
      {{0.8f, 40, 1.0f, 0.0f, false}, RowPlan::few},
      {{1.0f, 1, 0.9f, 0.0f, false}, RowPlan::few},
      {{1.0f, 0, 0.9f, 0.0f, false}, RowPlan::share},
      {{1.0f, 0, 0.3f, 0.0f, false}, RowPlan::share},
      {{1.0f, 0, 0.995f, 1e-6f, false}, RowPlan::share},
      {{1.0f, 0, 0.97f, 0.5f, false}, RowPlan::all},  // min-p keeps less
      {{1.0f, 40, 0.9f, 0.0f, true}, RowPlan::rest},
      {{1.0f, 9000, 1.0f, 0.0f, false}, RowPlan::rest},
  };
  std::mt19937 random(12);
  for (const RowSource source : {RowSource::logits, RowSource::weights}) {
    for (const Kind kind : {Kind::flat, Kind::peaked, Kind::masked}) {
      const Rows rows = random_rows(kind, 1, 30001, source, random);
      for (const Planned& which : cases) {
        if (source == RowSource::weights && which.filters.temperature != 1.0f) continue;
        if (!kEveryValue && random() % 4 != 0) continue;
        const Result gpu = on_gpu(rows, which.filters, RowResult::sample, random(), Split::parts);
        const cuda::SplitState state = gpu.states.at(0);
        CHECK(state.plan == which.plan);
        const bool has_list = which.plan == RowPlan::few || which.plan == RowPlan::share;
        CHECK_EQ(state.listed > 0 && state.listed <= 1000, has_list);
      }
    }
  }
}

TEST("equal values, more than a list holds, end heads by their tokens") {
  std::mt19937 random(13);
  const Rows rows = tied_rows(17001);
  for (const Filters& filters :
       {Filters{1.0f, 90, 0.9f, 0.0f, false}, Filters{1.0f, 0, 0.45f, 0.0f, false},
        Filters{1.0f, 0, 0.9f, 0.05f, false}, Filters{1.0f, 0, 1.0f, 0.2f, false}}) {
    for (int draw = 0; draw < 2; ++draw) compare_samples(rows, filters, random(), Split::parts);
  }
}

// Each row alone, and all rows with filters of their own, which the host does not see.
TEST("a row's token does not depend on the batch") {
  constexpr int64_t kRows = 5;
  constexpr int64_t kVocab = 9001;
  std::mt19937 random(14);
  const Rows rows = random_rows(Kind::flat, kRows, kVocab, RowSource::logits, random);
  const std::vector<float> temperature = {1.0f, 0.5f, 2.0f, 1.0f, 0.1f};
  const std::vector<int64_t> top_k = {9001, 9001, 10000, 20, 1};
  const std::vector<float> top_p = {1.0f, 0.5f, 0.9f, 1.0f, 0.1f};
  const std::vector<float> min_p = {0.0f, 0.1f, 0.0f, 0.0f, 1.0f};
  const std::vector<uint64_t> seeds = {1, 2, ~uint64_t{0}, 4, 5};
  const DeviceArray<float> x(rows.x), temperatures(temperature), top_ps(top_p), min_ps(min_p);
  const DeviceArray<int64_t> top_ks(top_k);
  const DeviceArray<uint64_t> seeds_there(seeds);
  const DeviceArray<int32_t> samples(static_cast<size_t>(kRows));
  const auto bytes = static_cast<size_t>(ops::SamplingScratch::of(kVocab).bytes());
  const DeviceArray<uint8_t> scratch(bytes * kRows);
  ops::RowSamplingProblem p = problem_of(rows, {}, RowResult::sample, 0);
  p.x = x.data();
  p.temperature.values = temperatures.data();
  p.top_k.values = top_ks.data();
  p.top_p.values = top_ps.data();
  p.min_p.values = min_ps.data();
  p.random.seed.values = seeds_there.data();
  p.samples = samples.data();
  p.scratch = scratch.data();
  run_on_gpu(p);
  const std::vector<int32_t> together = samples.values();
  for (int64_t row = 0; row < kRows; ++row) {
    const auto at = static_cast<size_t>(row);
    ops::RowSamplingProblem one = problem_of(
        rows, {temperature[at], top_k[at], top_p[at], min_p[at], false}, RowResult::sample, 0);
    one.rows = 1;
    one.x = x.data() + row * kVocab;
    one.random.seed.value = seeds[at];
    one.samples = samples.data();
    one.scratch = scratch.data();
    // A seed of all rows would number them.
    one.random.seed.values = seeds_there.data() + row;
    run_on_gpu(one);
    CHECK_EQ(samples.values()[0], together[at]);
    one.x = rows.x.data() + row * kVocab;
    one.random.seed.values = seeds.data() + row;
    one.scratch = nullptr;
    int32_t expected = -1;
    RowStatus status{};
    one.samples = &expected;
    one.statuses = &status;
    ops::run_alone(one, pool());
    CHECK_EQ(together[at], expected);
  }
}

TEST("rows without a distribution say why, and are 0") {
  const std::vector<std::vector<float>> logits = {{0.0f, kNan},
                                                  {kInfinity, kNan},
                                                  {kInfinity, 1.0f},
                                                  {-kInfinity, -kInfinity},
                                                  {-kInfinity, 3.0f}};
  const std::vector<std::vector<float>> weights = {
      {0.5f, kNan},       {-1.0f, 2.0f}, {kInfinity, 1.0f}, {kInfinity, -kInfinity},
      {-1.0f, kInfinity}, {0.0f, -0.0f}, {0.0f, 0x1p-149f}};
  constexpr int64_t kVocab = 8200;
  for (const auto& [source, cases] :
       {std::pair(RowSource::logits, logits), std::pair(RowSource::weights, weights)}) {
    Rows rows{source, static_cast<int64_t>(cases.size()), kVocab, {}, 0};
    for (const std::vector<float>& row : cases) {
      std::vector<float> all(kVocab, source == RowSource::logits ? -kInfinity : 0.0f);
      all[40] = row[0];
      all[8195] = row[1];
      rows.x.insert(rows.x.end(), all.begin(), all.end());
    }
    for (const Filters& filters :
         {Filters{}, Filters{1.0f, 2, 1.0f, 0.0f, false}, Filters{1.0f, 0, 0.9f, 0.0f, false}}) {
      const Result cpu = on_cpu(rows, filters, RowResult::sample);
      const Result gpu = on_gpu(rows, filters, RowResult::sample, 1, Split::parts);
      CHECK(cpu.statuses == gpu.statuses);
      CHECK(cpu.samples == gpu.samples);
    }
  }
}

TEST("every barrier is needed") {
  check_barriers(9000,
                 {{1.0f, 20, 0.9f, 0.1f, false},
                  {1.0f, 0, 0.9f, 0.0f, false},
                  {1.0f, 0, 1.0f, 0.0f, false},
                  {1.0f, 30, 0.9f, 0.0f, true}},
                 Split::parts, 15);
}

TEST("shared memory is read without conflicts") {
  check_banks(9000, Split::parts, 16);
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
