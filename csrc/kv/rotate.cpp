// Rotating stored keys by a difference of positions: R(p + d) = R(d) R(p), whatever p was.
#include <cmath>

#include "kv/kv_cache_impl.h"
#include "kv/token_rows.h"

namespace effinfer {
namespace {

struct Angles {
  std::vector<float> cos;
  std::vector<float> sin;
};

Angles angles_of(const KvRope& rope, int64_t delta) {
  Angles angles;
  for (const float frequency : rope.inv_freq) {
    const double angle = static_cast<double>(delta) * static_cast<double>(frequency);
    angles.cos.push_back(static_cast<float>(std::cos(angle)));
    angles.sin.push_back(static_cast<float>(std::sin(angle)));
  }
  return angles;
}

void rotate_row(const KvRope& rope, const Angles& angles, float* key) {
  const size_t half = rope.inv_freq.size();
  for (size_t d = 0; d < half; ++d) {
    float& x = key[rope.interleaved ? 2 * d : d];
    float& y = key[rope.interleaved ? 2 * d + 1 : d + half];
    const float rotated = x * angles.cos[d] - y * angles.sin[d];
    y = x * angles.sin[d] + y * angles.cos[d];
    x = rotated;
  }
}

}  // namespace

void KvCache::Impl::rotate(const kv::PageTable& table, size_t group, int64_t first,
                           int64_t delta) const {
  std::vector<float> key(static_cast<size_t>(config.head_dim));
  for (int32_t number = 0; number < config.num_layers; ++number) {
    if (!group_of_layer.empty() && group_of_layer[static_cast<size_t>(number)] != group) continue;
    const KvRope& rope = config.rope[static_cast<size_t>(number)];
    if (rope.inv_freq.empty()) continue;
    const Angles angles = angles_of(rope, delta);
    const ops::KvLayer& layer = layers[static_cast<size_t>(number)];
    for (int32_t head = 0; head < config.num_kv_heads; ++head) {
      for (int64_t slot = first; slot < table.slots; ++slot) {
        const ops::TokenPlace place = {table.pages[static_cast<size_t>(slot / kPageSize)],
                                       static_cast<int32_t>(slot % kPageSize)};
        kv::read_key(layer, head, place, key.data());
        rotate_row(rope, angles, key.data());
        kv::write_key(layer, head, key.data(), place);
      }
    }
  }
}

}  // namespace effinfer
