// The tables of ops/key_turns.h, of layers' rotations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "effinfer/kv_cache.h"
#include "ops/key_turns.h"

namespace effinfer::kv {

class KeyTurnTables {
 public:
  // For pages of sequences with at most so many. Of a config that says how its keys are rotated.
  KeyTurnTables(const KvCacheConfig& config, int32_t num_places);

  const ops::KeyTurns& layer(size_t number) const { return layers_[number]; }

 private:
  // Of a rotation; several layers may share them.
  struct Angles {
    std::vector<float> place_cos, place_sin, token_cos, token_sin;
  };
  ops::KeyTurns make(const KvRope& rope, int32_t num_places);

  std::vector<ops::KeyTurns> layers_;
  std::deque<Angles> angles_;
};

// Throws Unsupported where a config does not say how its keys are rotated, naming the field of its
// coding that needs that.
void require_rotations(const KvCacheConfig& config, const std::string& field);

}  // namespace effinfer::kv
