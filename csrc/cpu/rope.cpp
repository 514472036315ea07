#include "ops/rope.h"

#include <algorithm>
#include <cmath>

#include "cpu/level.h"

namespace effinfer::cpu {
namespace {

// Whether the map is for the sequence of a row.
bool is_mapped(const ops::RopeTableProblem& problem, int64_t row) {
  const ops::BatchLayout& batch = problem.batch;
  if (batch.unchunked == nullptr) return true;
  const int32_t* ends = batch.qo_indptr + 1;
  return !batch.is_unchunked(std::upper_bound(ends, ends + batch.num_sequences, row) - ends);
}

}  // namespace

// The angle is rounded to float32 as in the reference implementations (at position 100,000 the
// rounding is worth 4e-3 rad, so it decides the result); the cosine and sine of that float32 angle
// are then correctly rounded, whatever the C library's float functions do.
template <>
void run<Level::portable>(const ops::RopeTableProblem& problem, Team& team) {
  const int64_t half = problem.dims / 2;
  team.for_chunks(problem.rows, [&](int64_t row) {
    float* cos = problem.out + row * problem.dims;
    float* sin = cos + half;
    const int32_t given = problem.positions[row];
    const bool maps = problem.maps() && is_mapped(problem, row);
    const auto position = static_cast<float>(maps ? problem.map.place(given) : given);
    const float factor = maps ? problem.factor * problem.map.growth(given) : problem.factor;
    for (int64_t i = 0; i < half; ++i) {
      const float angle = position * problem.inv_freq[i];
      cos[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * factor;
      sin[i] = static_cast<float>(std::sin(static_cast<double>(angle))) * factor;
    }
  });
}

}  // namespace effinfer::cpu
