// Sampling on the GPU: the CPU's tokens wherever the kernel says so, its distributions, its masks.
#include <algorithm>
#include <cmath>
#include <random>

#include "effinfer/error.h"
#include "gpu/drawn_rows.h"
#include "gpu/paths.h"

namespace effinfer {
namespace {

TEST("the CPU's tokens, whatever the filters and lengths") {
  check_samples({1, 2, 63, 1000, 4096, 4097, 9004, 17003}, 1, kEveryValue ? 4 : 12, Split::none, 1);
}

TEST("equal values, more than shared memory holds, end heads by their tokens") {
  std::mt19937 random(2);
  const Rows rows = tied_rows(9001);
  for (const Filters& filters :
       {Filters{1.0f, 6000, 1.0f, 0.0f, false}, Filters{1.0f, 500, 0.7f, 0.0f, false},
        Filters{1.0f, 0, 0.45f, 0.0f, false}, Filters{1.0f, 5000, 0.9f, 0.0f, true},
        Filters{1.0f, 300, 0.9f, 0.1f, true}}) {
    for (int draw = 0; draw < 2; ++draw) compare_samples(rows, filters, random());
    if (filters.joint) continue;
    const Filters top{1.0f, filters.top_k, 1.0f, 0.0f, false};
    CHECK(on_cpu(rows, top, RowResult::logits).out == on_gpu(rows, top, RowResult::logits).out);
  }
}

// Zeros at the same places, numbers within a rounding of the sum and one of the quotient.
bool is_close(const std::vector<float>& got, const std::vector<float>& expected) {
  const double most = 4.0 * rounding(DType::f32);
  for (size_t i = 0; i < got.size(); ++i) {
    const auto exact = static_cast<double>(expected[i]);
    if (!(std::abs(static_cast<double>(got[i]) - exact) <= most * std::abs(exact))) return false;
  }
  return got.size() == expected.size();
}

TEST("what filters leave, as probabilities and as logits") {
  std::mt19937 random(3);
  for (const int64_t vocab : {1, 5, 1000, 4100, 12000}) {
    for (const Kind kind : {Kind::flat, Kind::tied, Kind::masked}) {
      for (const Filters& filters :
           {Filters{}, Filters{0.8f, 40, 1.0f, 0.0f, false}, Filters{1.0f, 0, 0.8f, 0.0f, false},
            Filters{1.2f, 600, 0.7f, 0.1f, false}, Filters{1.0f, 30, 0.9f, 0.0f, true}}) {
        const RowSource source = random() % 2 == 0 ? RowSource::logits : RowSource::weights;
        Rows rows = random_rows(kind, 2, vocab, source, random);
        rows.offset = static_cast<int64_t>(random() % 2);
        CHECK(is_close(on_gpu(rows, filters, RowResult::weights).out,
                       on_cpu(rows, filters, RowResult::weights).out));
        if (source == RowSource::weights || filters.joint) continue;
        const Filters top{filters.temperature, filters.top_k, 1.0f, 0.0f, false};
        const std::vector<float> logits = on_gpu(rows, top, RowResult::logits).out;
        CHECK(same_bits(logits, on_cpu(rows, top, RowResult::logits).out));
      }
    }
  }
}

TEST("a weight's bits are the CPU's: sums of one token and another") {
  std::mt19937 random(4);
  std::uniform_real_distribution<float> below(-90.0f, 0.0f);
  Rows rows{RowSource::logits, 1, 6000, {}, 0};
  for (int64_t i = 0; i < rows.vocab; ++i) rows.x.push_back(i == 0 ? 0.0f : below(random));
  const std::vector<float> got = on_gpu(rows, {}, RowResult::weights).out;
  CHECK(same_bits(got, on_cpu(rows, {}, RowResult::weights).out));
}

// The chance of a larger chi-square is about 1e-6 where this is more than 4.9.
double surprise(const std::vector<int64_t>& counts, const std::vector<double>& expected) {
  double chi = 0.0;
  double cells = -1.0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (expected[i] == 0.0) {
      if (counts[i] != 0) return 1e9;
      continue;
    }
    const double off = static_cast<double>(counts[i]) - expected[i];
    chi += off * off / expected[i];
    cells += 1.0;
  }
  // Wilson and Hilferty's normal approximation.
  const double shift = 2.0 / (9.0 * cells);
  return (std::cbrt(chi / cells) - (1.0 - shift)) / std::sqrt(shift);
}

TEST("draws are distributed as exact probabilities say") {
  needs_every_value();
  constexpr int64_t kVocab = 10;
  constexpr int64_t kDraws = 250;
  std::mt19937 random(5);
  const std::vector<float> x = normals(kVocab, random);
  const DeviceArray<float> there(x);
  for (const Filters& filters : {Filters{}, Filters{1.1f, 8, 0.8f, 0.1f, false}}) {
    const Rows rows{RowSource::logits, 1, kVocab, x, 0};
    const std::vector<float> probabilities = on_cpu(rows, filters, RowResult::weights).out;
    ops::RowSamplingProblem p = problem_of(rows, filters, RowResult::sample, 77);
    const DeviceArray<int64_t> indices(std::vector<int64_t>(kDraws, 0));
    const DeviceArray<int32_t> samples(static_cast<size_t>(kDraws));
    const DeviceArray<RowStatus> statuses(static_cast<size_t>(kDraws));
    p.rows = kDraws;
    p.indices = indices.data();
    p.x = there.data();
    p.samples = samples.data();
    p.statuses = statuses.data();
    run_on_gpu(p);
    std::vector<int64_t> counts(static_cast<size_t>(kVocab));
    for (const int32_t token : samples.values()) ++counts[static_cast<size_t>(token)];
    std::vector<double> expected;
    for (const float share : probabilities) expected.push_back(double{share} * kDraws);
    CHECK(surprise(counts, expected) < 4.9);
  }
}

TEST("filters and seeds of each row; a row's token does not depend on the batch") {
  constexpr int64_t kRows = 7;
  constexpr int64_t kVocab = 5000;
  std::mt19937 random(6);
  const Rows rows = random_rows(Kind::flat, kRows, kVocab, RowSource::logits, random);
  const std::vector<float> temperature = {1.0f, 0.5f, 2.0f, 1.0f, 1.0f, 0.1f, 1.0f};
  const std::vector<int64_t> top_k = {1, 5000, 9000, 20, 1, 50, 600};
  const std::vector<float> top_p = {1.0f, 0.5f, 0.9f, 1.0f, 0.1f, 0.9f, 0.7f};
  const std::vector<float> min_p = {0.0f, 0.1f, 0.0f, 0.0f, 1.0f, 0.0f, 0.02f};
  const std::vector<uint64_t> seeds = {1, 2, ~uint64_t{0}, 4, 5, 6, 7};
  const std::vector<uint64_t> offsets = {0, 1, 2, uint64_t{1} << 40, 4, 5, 6};
  std::vector<int32_t> expected(kRows);
  std::vector<RowStatus> expected_statuses(kRows);
  ops::RowSamplingProblem p = problem_of(rows, {}, RowResult::sample, 0);
  p.temperature.values = temperature.data();
  p.top_k.values = top_k.data();
  p.top_p.values = top_p.data();
  p.min_p.values = min_p.data();
  p.random.seed.values = seeds.data();
  p.random.offset.values = offsets.data();
  p.x = rows.x.data();
  p.samples = expected.data();
  p.statuses = expected_statuses.data();
  ops::run_alone(p, pool());
  const DeviceArray<float> x(rows.x);
  const DeviceArray<float> temperature_there(temperature), top_p_there(top_p), min_p_there(min_p);
  const DeviceArray<int64_t> top_k_there(top_k);
  const DeviceArray<uint64_t> seeds_there(seeds), offsets_there(offsets);
  const DeviceArray<int32_t> samples(static_cast<size_t>(kRows));
  const DeviceArray<RowStatus> statuses(static_cast<size_t>(kRows));
  p.samples = samples.data();
  p.statuses = statuses.data();
  // All rows, and the last ones in a call of their own.
  for (const int64_t first : {int64_t{0}, int64_t{4}}) {
    p.rows = kRows - first;
    p.x = x.data() + first * kVocab;
    p.temperature.values = temperature_there.data() + first;
    p.top_k.values = top_k_there.data() + first;
    p.top_p.values = top_p_there.data() + first;
    p.min_p.values = min_p_there.data() + first;
    p.random.seed.values = seeds_there.data() + first;
    p.random.offset.values = offsets_there.data() + first;
    run_on_gpu(p);
    const std::vector<int32_t> got = samples.values();
    CHECK(std::equal(expected.begin() + first, expected.end(), got.begin()));
  }
}

TEST("integers of 4 bytes in, of 8 bytes out; which rows are valid") {
  constexpr int64_t kOutputs = 6;
  std::mt19937 random(9);
  Rows rows = random_rows(Kind::flat, 3, 5000, RowSource::logits, random);
  rows.x[5000] = kNan;
  const std::vector<int32_t> indices = {2, 0, 1, 2, 2, 0}, top_k = {1, 40, 5, 900, 9000, 3};
  ops::RowSamplingProblem p = problem_of(rows, {}, RowResult::sample, 4);
  p.rows = kOutputs;
  std::vector<int64_t> expected(kOutputs);
  std::vector<RowStatus> statuses(kOutputs);
  p.x = rows.x.data();
  p.narrow_indices = indices.data();
  p.narrow_top_k = top_k.data();
  p.wide_samples = expected.data();
  p.statuses = statuses.data();
  ops::run_alone(p, pool());
  const DeviceArray<float> x(rows.x);
  const DeviceArray<int32_t> indices_there(indices), top_k_there(top_k);
  const DeviceArray<int64_t> samples(static_cast<size_t>(kOutputs));
  const DeviceArray<uint8_t> valid(static_cast<size_t>(kOutputs));
  p.x = x.data();
  p.narrow_indices = indices_there.data();
  p.narrow_top_k = top_k_there.data();
  p.wide_samples = samples.data();
  p.statuses = nullptr;
  p.valid = valid.data();
  run_on_gpu(p);
  CHECK(samples.values() == expected);
  CHECK(valid.values() == std::vector<uint8_t>({1, 1, 0, 1, 1, 1}));
}

TEST("rows without a distribution say why, and are 0") {
  const std::vector<std::vector<float>> logits = {{0.0f, kNan, 1.0f},
                                                  {kInfinity, 0.0f, kNan},
                                                  {0.0f, kInfinity, 1.0f},
                                                  {-kInfinity, -kInfinity, -kInfinity},
                                                  {-kInfinity, 3.0f, -kInfinity}};
  const std::vector<std::vector<float>> weights = {
      {0.5f, kNan, 0.5f},       {-1.0f, 2.0f, 0.0f},
      {kInfinity, 1.0f, 0.0f},  {kInfinity, -kInfinity, 0.0f},
      {-1.0f, kInfinity, 0.0f}, {0.0f, -0.0f, 0.0f},
      {0.0f, 0x1p-149f, 0.0f}};
  for (const auto& [source, cases] :
       {std::pair(RowSource::logits, logits), std::pair(RowSource::weights, weights)}) {
    for (const int64_t vocab : {3, 5000}) {
      Rows rows{source, static_cast<int64_t>(cases.size()), vocab, {}, 0};
      for (const std::vector<float>& row : cases) {
        std::vector<float> all(static_cast<size_t>(vocab),
                               source == RowSource::logits ? -kInfinity : 0.0f);
        for (size_t i = 0; i < 3; ++i) all[i * static_cast<size_t>(vocab) / 3] = row[i];
        rows.x.insert(rows.x.end(), all.begin(), all.end());
      }
      for (const RowResult result : {RowResult::sample, RowResult::weights, RowResult::logits}) {
        if (result == RowResult::logits && source == RowSource::weights) continue;
        const Filters filters{1.0f, 2, 1.0f, 0.0f, false};
        const Result cpu = on_cpu(rows, filters, result);
        const Result gpu = on_gpu(rows, filters, result);
        CHECK(cpu.statuses == gpu.statuses);
        CHECK(cpu.samples == gpu.samples || result != RowResult::sample);
        CHECK(same_bits(cpu.out, gpu.out));
      }
    }
  }
}

TEST("every barrier is needed") {
  check_barriers(6000,
                 {{1.0f, 20, 0.9f, 0.1f, false},
                  {1.0f, 0, 0.9f, 0.5f, false},
                  {1.0f, 900, 1.0f, 0.0f, false},
                  {1.0f, 30, 0.9f, 0.0f, true}},
                 Split::none, 7);
}

TEST("shared memory is read without conflicts") {
  check_banks(6000, Split::none, 8);
}

TEST("no rows; what is not built") {
  ops::RowSamplingProblem p;
  p.vocab = 10;
  run_on_gpu(p);
  p.dtype = DType::bf16;
  CHECK_THROWS(Unsupported, "rows are not float32", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
