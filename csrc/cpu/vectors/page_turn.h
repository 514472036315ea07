// Rotating the keys of a page of a head, or turning them back: [head_dim][64 tokens] floats.
#pragma once

#include <cstdint>

#include "ops/key_turns.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// By the positions of the page at a place of its sequence: cos(a + b) of the page and the token.
template <class V, bool kBack>
void turn_keys(const ops::KeyTurns& turns, int32_t place, float* keys) {
  constexpr int64_t kTokens = 64;
  // A place is read out of a page, and pages may come from anywhere.
  const auto most = static_cast<uint32_t>(turns.num_places - 1);
  const auto at = static_cast<uint32_t>(place) < most ? static_cast<uint32_t>(place) : most;
  const float* page_cos = turns.place_cos + int64_t{at} * turns.num_pairs;
  const float* page_sin = turns.place_sin + int64_t{at} * turns.num_pairs;
  for (int32_t pair = 0; pair < turns.num_pairs; ++pair) {
    float* x = keys + turns.first(pair) * kTokens;
    float* y = keys + turns.second(pair) * kTokens;
    const V c = V::set(page_cos[pair]);
    const V s = V::set(page_sin[pair]);
    for (int64_t t = 0; t < kTokens; t += 16) {
      const V token_cos = V::load(turns.token_cos + pair * kTokens + t);
      const V token_sin = V::load(turns.token_sin + pair * kTokens + t);
      const V cos = c * token_cos - s * token_sin;
      const V sine = fma(s, token_cos, c * token_sin);
      const V sin = kBack ? V::set(0.0f) - sine : sine;
      const V a = V::load(x + t);
      const V b = V::load(y + t);
      (a * cos - b * sin).store(x + t);
      fma(a, sin, b * cos).store(y + t);
    }
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
