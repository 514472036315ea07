// What keys and queries are hashed with, and how likely they are to collide: SimHash (Charikar,
// "Similarity estimation techniques from rounding algorithms", STOC 2002), as MagicPIG (Chen et
// al., arXiv:2410.16179) takes it.
//
// A bit of a vector says on which side of a random hyperplane it lies, so that two vectors at an
// angle a agree in it with p = 1 - a / pi. They collide in a table when all of its bits agree.
#pragma once

#include <cstdint>
#include <vector>

namespace effinfer::ops {

// Tables whose words lie together: the kernels take 8 words at a time.
inline constexpr int64_t kTablesTogether = 8;
constexpr bool is_hash_bits(int64_t bits) {
  return bits >= 1 && bits <= 8;
}
constexpr bool is_hash_tables(int64_t tables) {
  return tables > 0 && tables <= 256 && tables % kTablesTogether == 0;
}

// Of a KV head's `group` query heads, each with `tables` of its own of `bits` bits. The order of
// hyperplanes, of their bits in a query's code and of the words of a page's:
//
//   [query head][tables / 8][bits][8 tables]
struct HashShape {
  int32_t group = 1;
  int32_t tables = 0;  // a multiple of 8
  int32_t bits = 0;

  constexpr int64_t of_head() const { return int64_t{tables} * bits; }
  constexpr int64_t planes() const { return group * of_head(); }
  bool operator==(const HashShape&) const = default;
};

// Normals of the hyperplanes of a seed: [planes][head_dim].
std::vector<float> hash_planes(const HashShape& shape, int32_t head_dim, uint64_t seed);

// Of how likely two vectors are to collide in two tables of a head or more, at this many steps of
// the cosine between them and one more: from -1 to 1. Between two of them it is nearly a line,
// within 2e-5 of itself where the angle is at most 90 degrees.
inline constexpr int32_t kChanceSteps = 2048;
std::vector<float> hash_chances(const HashShape& shape);

// At a cosine, by those; of none, as of a vector of length 0, 1.
constexpr float hash_chance(const float* chances, float cosine) {
  if (cosine != cosine) return 1.0f;
  const float at = (cosine + 1.0f) * (kChanceSteps / 2);
  const float within = at < 0.0f ? 0.0f : at > kChanceSteps ? float{kChanceSteps} : at;
  const auto step = static_cast<int32_t>(within);
  if (step == kChanceSteps) return chances[step];
  return chances[step] + (within - static_cast<float>(step)) * (chances[step + 1] - chances[step]);
}

}  // namespace effinfer::ops
