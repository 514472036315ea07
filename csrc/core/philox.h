// Philox4x32-10, a counter-based generator: the n-th number of a key is computed, not iterated to.
// Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
#pragma once

#include <array>
#include <cstdint>

namespace effinfer {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

constexpr PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9;  // golden ratio
  constexpr uint32_t kWeyl1 = 0xBB67AE85;  // sqrt(3) - 1
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

// The index-th uniform number in [0, 1) of a seed, with 53 random bits; `row` and `draw` number
// independent sequences of the same seed.
constexpr double philox_uniform(uint64_t seed, uint64_t index, uint32_t row = 0,
                                uint32_t draw = 0) {
  const PhiloxCounter bits =
      philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), row, draw},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t high = static_cast<uint64_t>(bits[0]) << 32 | bits[1];
  return static_cast<double>(high >> 11) * 0x1p-53;
}

}  // namespace effinfer
