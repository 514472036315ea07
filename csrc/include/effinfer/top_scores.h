// How many of some scores are chosen.
#pragma once

#include <cstdint>

namespace effinfer {

// The `count` highest, the first among equals; or with `mass` > 0 as few of the highest as add up
// to that share of all.
struct TopScores {
  int32_t count = 0;
  float mass = 0.0f;
};

}  // namespace effinfer
