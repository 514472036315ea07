// Moving tokens within the engine's pages, on devices whose memory the host does not touch: an
// accepted path of drafts closes up (KvCache::keep).
#pragma once

#include <cstdint>
#include <string>

#include "ops/kv_layout.h"

namespace effinfer::ops {

struct TokenPlace {
  int32_t page;
  int32_t token;  // of the page
};

// K, V and scales of every head of a layer, move by move: a later one may read what none before it
// wrote, and write what any before it read.
struct MoveTokensProblem {
  static constexpr int32_t kMost = 64;

  KvLayer kv;
  int32_t count = 0;
  TokenPlace from[kMost];
  TokenPlace to[kMost];
};

std::string describe(const MoveTokensProblem& problem);

}  // namespace effinfer::ops
