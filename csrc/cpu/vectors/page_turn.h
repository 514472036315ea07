// Rotating the keys of a page of a head, or turning them back: [head_dim][64 tokens] floats.
#pragma once

#include <cstdint>

#include "ops/page_features.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// By the positions of the page at a place of its sequence: cos(a + b) of the page and the token.
template <class V, bool kBack>
void turn_keys(const ops::PageFeatures& features, int32_t place, float* keys) {
  constexpr int64_t kTokens = 64;
  // A place is read out of a page, and pages may come from anywhere.
  const auto most = static_cast<uint32_t>(features.num_places - 1);
  const auto at = static_cast<uint32_t>(place) < most ? static_cast<uint32_t>(place) : most;
  const float* page_cos = features.place_cos + int64_t{at} * features.num_pairs;
  const float* page_sin = features.place_sin + int64_t{at} * features.num_pairs;
  for (int64_t pair = 0; pair < features.num_pairs; ++pair) {
    float* x = keys + (features.interleaved ? 2 * pair : pair) * kTokens;
    float* y = x + (features.interleaved ? 1 : features.num_pairs) * kTokens;
    const V c = V::set(page_cos[pair]);
    const V s = V::set(page_sin[pair]);
    for (int64_t t = 0; t < kTokens; t += 16) {
      const V token_cos = V::load(features.token_cos + pair * kTokens + t);
      const V token_sin = V::load(features.token_sin + pair * kTokens + t);
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
