#include "kv/key_turn_tables.h"

#include <cmath>

#include "effinfer/error.h"

namespace effinfer::kv {
namespace {

constexpr int64_t kTokens = 64;  // of a page

// Of a position, rounded once.
struct Angle {
  float cos;
  float sin;
  Angle(int64_t position, float frequency) {
    const double angle = static_cast<double>(position) * static_cast<double>(frequency);
    cos = static_cast<float>(std::cos(angle));
    sin = static_cast<float>(std::sin(angle));
  }
};

bool same(const KvRope& a, const KvRope& b) {
  return a.inv_freq == b.inv_freq && a.interleaved == b.interleaved;
}

}  // namespace

void require_rotations(const KvCacheConfig& config, const std::string& field) {
  if (config.rope.size() == static_cast<size_t>(config.num_layers)) return;
  throw Unsupported("[kv_cache] coding." + field +
                    ": the config does not say how keys are rotated");
}

KeyTurnTables::KeyTurnTables(const KvCacheConfig& config, int32_t num_places) {
  for (size_t i = 0; i < config.rope.size(); ++i) {
    const bool repeats = i > 0 && same(config.rope[i - 1], config.rope[i]);
    layers_.push_back(repeats ? layers_.back() : make(config.rope[i], num_places));
  }
}

ops::KeyTurns KeyTurnTables::make(const KvRope& rope, int32_t num_places) {
  Angles& angles = angles_.emplace_back();
  for (int64_t place = 0; place < num_places; ++place) {
    for (const float frequency : rope.inv_freq) {
      const Angle angle(place * kTokens, frequency);
      angles.place_cos.push_back(angle.cos);
      angles.place_sin.push_back(angle.sin);
    }
  }
  for (const float frequency : rope.inv_freq) {
    for (int64_t token = 0; token < kTokens; ++token) {
      const Angle angle(token, frequency);
      angles.token_cos.push_back(angle.cos);
      angles.token_sin.push_back(angle.sin);
    }
  }
  return {static_cast<int32_t>(rope.inv_freq.size()),
          rope.interleaved,
          num_places,
          angles.place_cos.data(),
          angles.place_sin.data(),
          angles.token_cos.data(),
          angles.token_sin.data()};
}

}  // namespace effinfer::kv
