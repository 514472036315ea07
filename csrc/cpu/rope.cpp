#include "ops/rope.h"

#include <cmath>

#include "cpu/level.h"

namespace effinfer::cpu {
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
    const bool maps = problem.maps() && problem.is_mapped(row);
    const auto position = static_cast<float>(maps ? problem.map.place(given) : given);
    const auto log = [](double x) { return std::log(x); };
    const float factor = maps ? problem.factor * problem.map.growth(given, log) : problem.factor;
    for (int64_t i = 0; i < half; ++i) {
      const float angle = position * problem.inv_freq[i];
      cos[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * factor;
      sin[i] = static_cast<float>(std::sin(static_cast<double>(angle))) * factor;
    }
  });
}

}  // namespace effinfer::cpu
