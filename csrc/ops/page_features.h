// Coordinates in which coded pages may keep what a layer's heads have of a token: `count` numbers
// in place of all heads' keys, and as many in place of their values (channel shrinking, CSKV, Wang
// et al., arXiv:2409.10593).
//
// With x of all heads' dimensions, and a basis B of rows that are orthonormal, features are B x,
// and what they stand for is B^T (B x). Keys are turned back by their positions before, since
// rotated ones are spread over far more directions, and turned again when they are read.
//
// Neighbouring layers may share features: x is then of all of them, each has its columns of B, and
// features are the sums over layers, which one page holds for all (cross-layer SVD, xKV, Chang et
// al., arXiv:2503.18893).
#pragma once

#include <cstdint>

#include "ops/key_turns.h"

namespace effinfer::ops {

// A layer's. Rows of `keys` and `values` are features, of key_dims and value_dims dimensions, head
// after head: their transposes.
struct PageFeatures {
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t count = 0;
  int32_t shared_layers = 1;          // that have them in common
  const float* keys = nullptr;        // [count][num_kv_heads * head_dim]
  const float* values = nullptr;      // the same
  const float* key_dims = nullptr;    // [num_kv_heads * head_dim][count]
  const float* value_dims = nullptr;  // the same

  KeyTurns turns = {};

  static constexpr int32_t kMostPart = 256;  // of features that are coded together
  int64_t dims() const { return int64_t{num_kv_heads} * head_dim; }
  int32_t num_parts() const { return (count + kMostPart - 1) / kMostPart; }
  int32_t part_count() const { return count / num_parts(); }
};

}  // namespace effinfer::ops
