// What tests of drawing tokens share: rows, filters, and the CPU's tokens beside the device's.
#pragma once

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <random>
#include <string>

#include "cuda/bodies/split_rows.h"
#include "gpu/sampling_rows.h"
#include "ops/sampling_scratch.h"

namespace effinfer {

using ops::RowResult;
using ops::RowSource;
using ops::RowStatus;

struct Filters {
  float temperature = 1.0f;
  int64_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  bool joint = false;
};

struct Rows {
  RowSource source = RowSource::logits;
  int64_t rows = 0;
  int64_t vocab = 0;
  std::vector<float> x;
  int64_t offset = 0;  // in elements, off alignment
};

struct Result {
  std::vector<int32_t> samples;
  std::vector<uint8_t> undecided;
  std::vector<float> out;
  std::vector<RowStatus> statuses;
  // Of rows that blocks share: what became of each, and of its list.
  std::vector<cuda::SplitState> states;
};

inline ops::RowSamplingProblem problem_of(const Rows& rows, const Filters& filters,
                                          RowResult result, uint64_t seed) {
  ops::RowSamplingProblem p;
  p.source = rows.source;
  p.result = result;
  p.vocab = rows.vocab;
  p.rows = rows.rows;
  p.temperature.value = filters.temperature;
  p.top_k.value = filters.top_k;
  p.top_p.value = filters.top_p;
  p.min_p.value = filters.min_p;
  p.joint = filters.joint;
  p.random.seed.value = seed;
  return p;
}

inline Result on_cpu(const Rows& rows, const Filters& filters, RowResult result,
                     uint64_t seed = 1) {
  ops::RowSamplingProblem p = problem_of(rows, filters, result, seed);
  p.x = rows.x.data();
  Result got;
  got.samples.resize(static_cast<size_t>(rows.rows));
  got.statuses.resize(static_cast<size_t>(rows.rows));
  p.samples = got.samples.data();
  p.statuses = got.statuses.data();
  if (result != RowResult::sample) {
    got.out.resize(static_cast<size_t>(rows.rows * rows.vocab));
    p.out = got.out.data();
  }
  ops::run_alone(p, pool());
  return got;
}

// Whether a row that is long enough is shared by blocks.
enum class Split : uint8_t { none, parts };

inline Result on_gpu(const Rows& rows, const Filters& filters, RowResult result, uint64_t seed = 1,
                     Split split = Split::none) {
  ops::RowSamplingProblem p = problem_of(rows, filters, result, seed);
  const auto count = static_cast<size_t>(rows.rows);
  const FloatRows x(DType::f32, rows.x, rows.offset);
  const DeviceArray<int32_t> samples(count);
  const DeviceArray<uint8_t> undecided(count);
  const DeviceArray<RowStatus> statuses(count);
  const FloatRows out(DType::f32, result == RowResult::sample ? 0 : rows.rows * rows.vocab);
  p.x = x.data();
  p.samples = samples.data();
  p.undecided = undecided.data();
  p.statuses = statuses.data();
  p.out = out.data();
  const int64_t bytes = ops::SamplingScratch::of(rows.vocab).bytes();
  const DeviceArray<uint8_t> scratch(static_cast<size_t>(bytes) * count);
  if (split == Split::parts) p.scratch = scratch.data();
  run_on_gpu(p);
  Result got;
  got.statuses = statuses.values();
  if (result == RowResult::sample) {
    got.samples = samples.values();
    got.undecided = undecided.values();
    const std::vector<uint8_t> words = scratch.values();
    for (int64_t at = 0; split == Split::parts && at < std::ssize(words); at += bytes) {
      std::memcpy(&got.states.emplace_back(), words.data() + at, sizeof(cuda::SplitState));
    }
  } else {
    got.out = out.values();
  }
  return got;
}

// --- rows ----------------------------------------------------------------------------------------

enum class Kind : uint8_t { flat, peaked, tied, masked };

inline Rows random_rows(Kind kind, int64_t count, int64_t vocab, RowSource source,
                        std::mt19937& random) {
  Rows rows{source, count, vocab, normals(count * vocab, random), 0};
  for (size_t i = 0; i < rows.x.size(); ++i) {
    float& x = rows.x[i];
    if (kind == Kind::peaked) x *= 4.0f;
    if (kind == Kind::tied) x = std::round(2.0f * x) / 2.0f;
    if (kind == Kind::masked && i % static_cast<size_t>(vocab) % 5 != 0) x = -kInfinity;
    if (source == RowSource::weights) x = std::exp(x) / static_cast<float>(vocab);
  }
  return rows;
}

// Rows of equal values, of two of them and of a few among many that weigh nothing.
inline Rows tied_rows(int64_t vocab) {
  Rows rows{RowSource::logits, 3, vocab, {}, 0};
  for (int64_t i = 0; i < 3 * vocab; ++i) {
    const float levels[] = {0.0f, i % 7 == 0 ? 1.0f : -1.0f, i % 100 == 3 ? 0.5f : -kInfinity};
    rows.x.push_back(levels[i / vocab]);
  }
  return rows;
}

inline const Filters kFilters[] = {
    {},
    {0.7f, 0, 1.0f, 0.0f, false},
    {1.0f, 1, 1.0f, 0.0f, false},
    {0.8f, 40, 1.0f, 0.0f, false},
    {1.3f, 700, 1.0f, 0.0f, false},
    {1.0f, 0, 0.9f, 0.0f, false},
    {1.0f, 0, 0.3f, 0.0f, false},
    {1.0f, 0, 1.0f, 0.1f, false},
    {0.9f, 50, 0.8f, 0.05f, false},
    {0.9f, 1000, 0.95f, 0.01f, false},
    {1.0f, 0, 0.97f, 0.2f, false},
    {0.9f, 50, 0.8f, 0.05f, true},
    {1.0f, 50, 0.2f, 0.0f, true},
    {1.0f, 900, 0.9f, 0.0f, true},
    {1e-3f, 0, 0.9f, 0.0f, false},
    {1e-42f, 0, 1.0f, 0.0f, false},
};

// How many of the samples the kernels leave to the CPU; all others must be the CPU's.
inline int64_t compare_samples(const Rows& rows, const Filters& filters, uint64_t seed,
                               Split split = Split::none) {
  const Result cpu = on_cpu(rows, filters, RowResult::sample, seed);
  const Result gpu = on_gpu(rows, filters, RowResult::sample, seed, split);
  int64_t left = 0;
  for (size_t row = 0; row < cpu.samples.size(); ++row) {
    CHECK(cpu.statuses[row] == gpu.statuses[row]);
    if (gpu.undecided[row] != 0) {
      ++left;
    } else {
      CHECK_EQ(gpu.samples[row], cpu.samples[row]);
    }
  }
  return left;
}

// That hardly any of them are left, of rows of those lengths with some of the filters: one of each
// `every`, as a block of the emulator takes its time.
inline void check_samples(std::initializer_list<int64_t> lengths, int64_t count, uint32_t every,
                          Split split, uint32_t seed) {
  std::mt19937 random(seed);
  int64_t all = 0;
  int64_t left = 0;
  for (const int64_t vocab : lengths) {
    for (const Kind kind : {Kind::flat, Kind::peaked, Kind::tied, Kind::masked}) {
      for (const RowSource source : {RowSource::logits, RowSource::weights}) {
        Rows rows = random_rows(kind, count, vocab, source, random);
        rows.offset = static_cast<int64_t>(random() % 2);
        for (const Filters& filters : kFilters) {
          if (random() % every != 0) continue;
          if (source == RowSource::weights && filters.temperature != 1.0f) continue;
          left += compare_samples(rows, filters, random(), split);
          all += rows.rows;
        }
      }
    }
  }
  CHECK(left * 50 < all);
}

// --- machines ------------------------------------------------------------------------------------

// Of rows of `vocab` logits with each of the filters.
inline void check_barriers(int64_t vocab, std::initializer_list<Filters> cases, Split split,
                           uint32_t seed) {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no race is detected");
  std::mt19937 random(seed);
  const Rows flat = random_rows(Kind::flat, 1, vocab, RowSource::logits, random);
  const Rows tied = random_rows(Kind::tied, 1, vocab, RowSource::logits, random);
  std::vector<int32_t> expected;
  for (const Rows* rows : {&flat, &tied}) {
    for (const Filters& filters : cases) {
      expected.push_back(on_cpu(*rows, filters, RowResult::sample).samples[0]);
    }
  }
  expect_every_barrier_matters([&] {
    size_t i = 0;
    for (const Rows* rows : {&flat, &tied}) {
      for (const Filters& filters : cases) {
        const Result gpu = on_gpu(*rows, filters, RowResult::sample, 1, split);
        if (gpu.samples[0] != expected[i++]) return false;
      }
    }
    return true;
  });
}

inline void check_banks(int64_t vocab, Split split, uint32_t seed) {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no access is seen");
  std::mt19937 random(seed);
  const Rows rows = random_rows(Kind::flat, 1, vocab, RowSource::logits, random);
  const cuda::host::Banks banks = cuda::host::count_banks(
      [&] { on_gpu(rows, {1.0f, 0, 0.9f, 0.0f, false}, RowResult::sample, 1, split); });
  if (banks.cycles * 10 > banks.least * 11) {
    check::fail(__FILE__, __LINE__,
                std::to_string(banks.cycles) + " cycles for " + std::to_string(banks.least) +
                    ", most at " + banks.worst);
  }
}

}  // namespace effinfer
