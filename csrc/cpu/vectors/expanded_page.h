// A head's page made of floats, as attention multiplies it (ops/kv_layout.h): of bfloat16 or
// float32.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "cpu/vectors/key_unit.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Two lines of 16 numbers as one of pairs.
template <class V>
void store_pairs(const float* even, const float* odd, uint32_t* to) {
  Bf16 low[16];
  Bf16 high[16];
  V::load(even).store(low);
  V::load(odd).store(high);
  for (int i = 0; i < 16; ++i) to[i] = low[i].bits | uint32_t{high[i].bits} << 16;
}

// Of keys [dim][64 tokens].
template <class Kv>
void store_keys(const float* keys, int64_t dim, uint32_t* to) {
  using V = typename Kv::V;
  for (int64_t t = 0; t < kUnit; t += 16) {
    for (int64_t d = 0; d < dim; d += Kv::P, to += 16) {
      const float* line = keys + d * kUnit + t;
      if constexpr (Kv::P == 1) {
        V::load(line).store(reinterpret_cast<float*>(to));
      } else {
        store_pairs<V>(line, line + kUnit, to);
      }
    }
  }
}

// Of values [64 tokens][dim].
template <class Kv>
void store_values(const float* values, int64_t dim, uint32_t* to) {
  using V = typename Kv::V;
  for (int64_t t = 0; t < kUnit; t += Kv::P) {
    for (int64_t d = 0; d < dim; d += 16, to += 16) {
      const float* line = values + t * dim + d;
      if constexpr (Kv::P == 1) {
        V::load(line).store(reinterpret_cast<float*>(to));
      } else {
        store_pairs<V>(line, line + dim, to);
      }
    }
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
