#include "ops/hash_tables.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/philox.h"

namespace effinfer::ops {
namespace {

// Of a key that hardly ever collides: it counts this seldom at least.
constexpr double kLeastChance = 1e-12;

// That two or more of `tables` collide, each with probability x: a sum without cancellation.
double chance_of_two(int32_t tables, double x) {
  const double others = std::pow(1.0 - x, tables - 2);
  // Of so many tables that nearly all collide the sum would begin at 0.
  if (others < std::numeric_limits<double>::min()) return 1.0;
  double term = 0.5 * tables * (tables - 1) * x * x * others;
  double sum = 0.0;
  for (int32_t count = 2; count <= tables && term > 0.0; ++count) {
    sum += term;
    term *= (tables - count) / (count + 1.0) * x / (1.0 - x);
  }
  return std::min(sum, 1.0);
}

}  // namespace

std::vector<float> hash_planes(const HashShape& shape, int32_t head_dim, uint64_t seed) {
  std::vector<float> normals(static_cast<size_t>(shape.planes() * head_dim));
  for (size_t i = 0; i < normals.size(); i += 2) {
    // Box and Muller's transform; 1 - u is in (0, 1].
    const double radius = std::sqrt(-2.0 * std::log(1.0 - philox_uniform(seed, i)));
    const double angle = 2.0 * std::numbers::pi * philox_uniform(seed, i + 1);
    normals[i] = static_cast<float>(radius * std::cos(angle));
    if (i + 1 < normals.size()) normals[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
  return normals;
}

std::vector<float> hash_chances(const HashShape& shape) {
  std::vector<float> chances;
  for (int32_t step = 0; step <= kChanceSteps; ++step) {
    const double cosine = step / (kChanceSteps / 2.0) - 1.0;
    const double agree = 1.0 - std::acos(cosine) / std::numbers::pi;
    const double chance = chance_of_two(shape.tables, std::pow(agree, shape.bits));
    chances.push_back(static_cast<float>(std::max(chance, kLeastChance)));
  }
  return chances;
}

}  // namespace effinfer::ops
