#include "runtime/key_noise.h"

#include <cmath>

#include "core/philox.h"

namespace effinfer::runtime {
namespace {

constexpr double kLeast = 0x1p-54;  // 0 of 53 bits has a logarithm, too

}  // namespace

// FNV-1a, a token at a time.
uint64_t noise_seed(std::span<const int32_t> prompt) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const int32_t token : prompt) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x100000001B3;
  }
  return hash;
}

void set_gumbel_noise(uint64_t seed, int64_t position, int64_t count, const NoisyHeads& heads) {
  const SlotPlane& plane = heads.plane;
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    float* row = plane.values + head * plane.stride + heads.num_slots - count;
    for (int64_t i = 0; i < count; ++i) {
      const double uniform =
          philox_uniform(seed, static_cast<uint64_t>(position + i), static_cast<uint32_t>(head));
      row[i] = static_cast<float>(-std::log(-std::log(uniform + kLeast)));
    }
  }
}

}  // namespace effinfer::runtime
