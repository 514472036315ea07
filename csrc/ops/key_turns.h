// Angles by which a layer's keys are rotated, for coded pages that keep them turned back by their
// positions (cpu/vectors/page_turn.h).
#pragma once

#include <cstdint>

namespace effinfer::ops {

// Of a page's first token, whose page of the sequence is below num_places, and of its tokens beside
// that. Pair i is dimensions (i, i + num_pairs), or (2 i, 2 i + 1).
struct KeyTurns {
  int32_t num_pairs = 0;
  bool interleaved = false;
  int32_t num_places = 0;
  const float* place_cos = nullptr;  // [num_places][num_pairs]
  const float* place_sin = nullptr;
  const float* token_cos = nullptr;  // [num_pairs][64]
  const float* token_sin = nullptr;

  constexpr int32_t first(int32_t pair) const { return interleaved ? 2 * pair : pair; }
  constexpr int32_t second(int32_t pair) const {
    return interleaved ? 2 * pair + 1 : pair + num_pairs;
  }
};

}  // namespace effinfer::ops
