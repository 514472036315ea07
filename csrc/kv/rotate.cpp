// Rotating stored keys by a difference of positions: R(p + d) = R(d) R(p), whatever p was.
#include <cmath>

#include "kv/kv_cache_impl.h"

namespace effinfer {

kv::KvTurn::KvTurn(const KvRope& rope, int64_t positions) : interleaved(rope.interleaved) {
  for (const float frequency : rope.inv_freq) {
    const double angle = static_cast<double>(positions) * static_cast<double>(frequency);
    cos.push_back(static_cast<float>(std::cos(angle)));
    sin.push_back(static_cast<float>(std::sin(angle)));
  }
}

void kv::KvTurn::apply(float* key) const {
  const size_t half = cos.size();
  for (size_t d = 0; d < half; ++d) {
    float& x = key[interleaved ? 2 * d : d];
    float& y = key[interleaved ? 2 * d + 1 : d + half];
    const float rotated = x * cos[d] - y * sin[d];
    y = x * sin[d] + y * cos[d];
    x = rotated;
  }
}

void KvCache::Impl::rotate(const kv::PageTable& table, size_t group, int64_t first, int64_t delta) {
  std::vector<kv::KvTurn> turns;
  for (size_t layer = 0; layer < config.rope.size(); ++layer) {
    if (!group_of_layer.empty() && group_of_layer[layer] != group) continue;
    turns.emplace_back(config.rope[layer], delta);
  }
  pool(group).rotate(table.pages, first, table.slots, turns);
}

}  // namespace effinfer
