// Sampling on the GPU: the CPU's tokens wherever the kernel says so, its distributions, its masks.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "effinfer/threads.h"
#include "gpu/float_rows.h"
#include "gpu/mutations.h"
#include "ops/row_sampling.h"

namespace effinfer {
namespace {

using ops::RowResult;
using ops::RowSource;
using ops::RowStatus;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Filters {
  float temperature = 1.0f;
  int64_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  bool joint = false;
};

struct Rows {
  RowSource source = RowSource::logits;
  DType dtype = DType::f32;
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
};

ThreadPool& pool() {
  static ThreadPool threads(2);
  return threads;
}

ops::RowSamplingProblem problem_of(const Rows& rows, const Filters& filters, RowResult result,
                                   uint64_t seed) {
  ops::RowSamplingProblem p;
  p.source = rows.source;
  p.result = result;
  p.dtype = rows.dtype;
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

Result on_cpu(const Rows& rows, const Filters& filters, RowResult result, uint64_t seed = 1) {
  ops::RowSamplingProblem p = problem_of(rows, filters, result, seed);
  std::vector<uint16_t> narrow(rows.x.size());
  cpu::with_row_elements(rows.dtype, [&]<class E>() {
    for (size_t i = 0; i < rows.x.size() && rows.dtype != DType::f32; ++i) {
      const typename E::Stored stored = E::store(rows.x[i]);
      std::memcpy(&narrow[i], &stored, sizeof narrow[i]);
    }
  });
  p.x = rows.dtype == DType::f32 ? static_cast<const void*>(rows.x.data()) : narrow.data();
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

Result on_gpu(const Rows& rows, const Filters& filters, RowResult result, uint64_t seed = 1,
              DType out_dtype = DType::f32) {
  ops::RowSamplingProblem p = problem_of(rows, filters, result, seed);
  const auto count = static_cast<size_t>(rows.rows);
  const FloatRows x(rows.dtype, rows.x, rows.offset);
  const DeviceArray<int32_t> samples(count);
  const DeviceArray<uint8_t> undecided(count);
  const DeviceArray<RowStatus> statuses(count);
  const FloatRows out(out_dtype, result == RowResult::sample ? 0 : rows.rows * rows.vocab);
  p.x = x.data();
  p.samples = samples.data();
  p.undecided = undecided.data();
  p.statuses = statuses.data();
  p.out = out.data();
  p.out_dtype = out_dtype;
  run_on_gpu(p);
  Result got;
  got.statuses = statuses.values();
  if (result == RowResult::sample) {
    got.samples = samples.values();
    got.undecided = undecided.values();
  } else {
    got.out = out.values();
  }
  return got;
}

// --- rows ----------------------------------------------------------------------------------------

enum class Kind : uint8_t { flat, peaked, tied, masked };

Rows random_rows(Kind kind, int64_t count, int64_t vocab, DType dtype, RowSource source,
                 std::mt19937& random) {
  Rows rows{source, dtype, count, vocab, normals(count * vocab, random), 0};
  for (size_t i = 0; i < rows.x.size(); ++i) {
    float& x = rows.x[i];
    if (kind == Kind::peaked) x *= 4.0f;
    if (kind == Kind::tied) x = std::round(2.0f * x) / 2.0f;
    if (kind == Kind::masked && i % static_cast<size_t>(vocab) % 5 != 0) x = -kInfinity;
    if (source == RowSource::weights) x = std::exp(x) / static_cast<float>(vocab);
    x = rounded(dtype, x);
  }
  return rows;
}

const Filters kFilters[] = {
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

// How many of the samples the kernel leaves to the CPU; all others must be the CPU's.
int64_t compare_samples(const Rows& rows, const Filters& filters, uint64_t seed) {
  const Result cpu = on_cpu(rows, filters, RowResult::sample, seed);
  const Result gpu = on_gpu(rows, filters, RowResult::sample, seed);
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

TEST("the CPU's tokens, whatever the filters, types and lengths") {
  std::mt19937 random(1);
  int64_t all = 0;
  int64_t left = 0;
  for (const int64_t vocab : {1, 2, 63, 1000, 4096, 4097, 5004, 20011}) {
    for (const Kind kind : {Kind::flat, Kind::peaked, Kind::masked}) {
      for (const RowSource source : {RowSource::logits, RowSource::weights}) {
        const DType dtype = kRowTypes[random() % 3];
        Rows rows = random_rows(kind, 2, vocab, dtype, source, random);
        rows.offset = static_cast<int64_t>(random() % 2);
        for (const Filters& filters : kFilters) {
          if (source == RowSource::weights && filters.temperature != 1.0f) continue;
          left += compare_samples(rows, filters, random());
          all += rows.rows;
        }
      }
    }
  }
  CHECK(left * 20 < all);
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
