// The highest numbers of rows on the GPU against a sort.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/device_arrays.h"
#include "gpu/mutations.h"
#include "ops/top_rows.h"

namespace effinfer {
namespace {

std::vector<int32_t> sorted_indices(const float* row, int64_t cols) {
  std::vector<int32_t> indices(static_cast<size_t>(cols));
  std::iota(indices.begin(), indices.end(), 0);
  std::stable_sort(indices.begin(), indices.end(), [&](int32_t a, int32_t b) {
    const bool nan_a = std::isnan(row[a]);
    const bool nan_b = std::isnan(row[b]);
    if (nan_a || nan_b) return nan_a && !nan_b;
    return row[a] > row[b];
  });
  return indices;
}

bool is_right(const std::vector<float>& x, int64_t rows, int64_t cols, int32_t k) {
  const DeviceArray<float> there(x);
  const auto count = static_cast<size_t>(rows * k);
  const DeviceArray<float> values(count);
  const DeviceArray<int32_t> indices(count);
  run_on_gpu(ops::TopRowsProblem{there.data(), rows, cols, k, values.data(), indices.data()});
  const std::vector<float> got_values = values.values();
  const std::vector<int32_t> got = indices.values();
  for (int64_t row = 0; row < rows; ++row) {
    const float* of = x.data() + row * cols;
    const std::vector<int32_t> expected = sorted_indices(of, cols);
    for (int32_t i = 0; i < k; ++i) {
      const auto place = static_cast<size_t>(row * k + i);
      if (got[place] != expected[static_cast<size_t>(i)]) return false;
      const float value = of[got[place]];
      if (!(got_values[place] == value || (std::isnan(value) && std::isnan(got_values[place])))) {
        return false;
      }
    }
  }
  return true;
}

TEST("rows of any length, with equal numbers, infinities, zeros of both signs and NaNs") {
  std::mt19937 random(1);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int64_t cols : {1, 2, 63, 1024, 1025, 5000, 140002}) {
    for (const int32_t k : {1, 2, 8, 64}) {
      if (k > cols || (cols > 5000 && k != 8)) continue;
      constexpr int64_t kRows = 4;
      std::vector<float> x = normals(kRows * cols, random);
      for (int64_t i = 0; i < cols; ++i) {
        x[static_cast<size_t>(cols + i)] = std::round(2 * x[static_cast<size_t>(cols + i)]) / 2;
        x[static_cast<size_t>(2 * cols + i)] = i % 3 == 0 ? -kInfinity : i % 3 == 1 ? 0.0f : -0.0f;
      }
      x[static_cast<size_t>(3 * cols + cols / 2)] = std::numeric_limits<float>::quiet_NaN();
      x[static_cast<size_t>(3 * cols + cols - 1)] = kInfinity;
      CHECK(is_right(x, kRows, cols, k));
    }
  }
}

TEST("its barrier is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no race is detected");
  std::mt19937 random(2);
  const std::vector<float> x = normals(3000, random);
  expect_every_barrier_matters([&] { return is_right(x, 2, 1500, 3); }, 5);
}

TEST("no rows; what does not fit") {
  run_on_gpu(ops::TopRowsProblem{nullptr, 0, 10, 3, nullptr, nullptr});
  CHECK_THROWS(Unsupported, "k is not 1 to 64",
               run_on_gpu(ops::TopRowsProblem{nullptr, 1, 10, 11, nullptr, nullptr}));
  CHECK_THROWS(Unsupported, "k is not 1 to 64",
               run_on_gpu(ops::TopRowsProblem{nullptr, 1, 100, 65, nullptr, nullptr}));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
