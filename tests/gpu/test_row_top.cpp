// The highest of each row as a result on the GPU: the CPU's.
#include <algorithm>
#include <cmath>
#include <random>

#include "effinfer/error.h"
#include "gpu/sampling_rows.h"

namespace effinfer {
namespace {

using ops::RowStatus;

struct Rows {
  int64_t rows = 0;
  int64_t vocab = 0;
  std::vector<float> x;
  int64_t offset = 0;  // in elements, off alignment
};

enum class Kind : uint8_t { flat, tied, masked };

Rows random_rows(Kind kind, int64_t count, int64_t vocab, std::mt19937& random) {
  Rows rows{count, vocab, normals(count * vocab, random), 0};
  for (size_t i = 0; i < rows.x.size(); ++i) {
    float& x = rows.x[i];
    if (kind == Kind::tied) x = std::round(2.0f * x) / 2.0f;
    if (kind == Kind::masked && i % static_cast<size_t>(vocab) % 5 != 0) x = -kInfinity;
  }
  return rows;
}

struct Highest {
  std::vector<float> values;
  std::vector<int64_t> ids;
  std::vector<RowStatus> statuses;
  bool operator==(const Highest&) const = default;
};

Highest highest(const Rows& rows, int64_t k, bool sorted, bool on_device) {
  ops::RowSamplingProblem p;
  p.result = ops::RowResult::top;
  p.rows = rows.rows;
  p.vocab = rows.vocab;
  p.top_k.value = k;
  p.sorted = sorted;
  const auto count = static_cast<size_t>(rows.rows * k);
  const auto size = static_cast<size_t>(rows.rows);
  Highest got{std::vector<float>(count), std::vector<int64_t>(count), std::vector<RowStatus>(size)};
  if (!on_device) {
    p.x = rows.x.data();
    p.out = got.values.data();
    p.ids = got.ids.data();
    p.statuses = got.statuses.data();
    ops::run_alone(p, pool());
    return got;
  }
  const FloatRows x(DType::f32, rows.x, rows.offset);
  const DeviceArray<float> values(count);
  const DeviceArray<int64_t> ids(count);
  const DeviceArray<RowStatus> statuses(size);
  p.x = x.data();
  p.out = values.data();
  p.ids = ids.data();
  p.statuses = statuses.data();
  run_on_gpu(p);
  return {values.values(), ids.values(), statuses.values()};
}

TEST("the highest, in the order of tokens or sorted") {
  std::mt19937 random(10);
  for (const int64_t vocab : {1, 2, 63, 4096, 4097, 9001}) {
    for (const Kind kind : {Kind::flat, Kind::tied, Kind::masked}) {
      Rows rows = random_rows(kind, 2, vocab, random);
      rows.offset = static_cast<int64_t>(random() % 2);
      for (const int64_t k : {int64_t{1}, vocab / 3, std::min<int64_t>(vocab, 4096), vocab}) {
        for (const bool sorted : {false, true}) {
          if (k < 1 || (sorted && k > 4096) || random() % 2 == 0) continue;
          CHECK(highest(rows, k, sorted, true) == highest(rows, k, sorted, false));
        }
      }
    }
  }
  Rows nan = random_rows(Kind::flat, 1, 100, random);
  nan.x[7] = kNan;
  CHECK(highest(nan, 5, true, true) ==
        (Highest{std::vector<float>(5), std::vector<int64_t>(5), {RowStatus::nan}}));
}

TEST("every barrier of the highest is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no race is detected");
  std::mt19937 random(11);
  const Rows tied = random_rows(Kind::tied, 1, 5000, random);
  const Rows flat = random_rows(Kind::flat, 1, 5000, random);
  const Highest few = highest(flat, 300, true, false);
  const Highest many = highest(tied, 3000, false, false);
  expect_every_barrier_matters([&] {
    return highest(flat, 300, true, true) == few && highest(tied, 3000, false, true) == many;
  });
}

TEST("no rows; what is not built") {
  ops::RowSamplingProblem p;
  p.result = ops::RowResult::top;
  p.vocab = 5000;
  p.top_k.value = 4097;
  run_on_gpu(p);
  p.sorted = true;
  CHECK_THROWS(Unsupported, "at most 4096 are sorted", run_on_gpu(p));
  p.sorted = false;
  p.dtype = DType::bf16;
  CHECK_THROWS(Unsupported, "rows are not float32", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
