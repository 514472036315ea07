// Codebooks of which coded pages may keep numbers of vectors in place of keys and values: 4
// dimensions are one of 256 vectors, 2 bits a dimension (CommVQ, Li et al., arXiv:2506.18879).
//
// Keys are turned back by their positions before, and turned again when they are read: a vector has
// both dimensions of the pairs that a position rotates, so that turning what codes stand for is
// turning vectors of the codebook.
#pragma once

#include <cstdint>

#include "ops/key_turns.h"

namespace effinfer::ops {

// A layer's. Vector g of a head's keys is of dimensions order[4 g ...]: of pairs 2 g and 2 g + 1,
// and behind all pairs of neighbours. That of values is of dimensions 4 g ... 4 g + 3.
struct PageCodebooks {
  static constexpr int32_t kDims = 4;       // of a vector
  static constexpr int32_t kVectors = 256;  // of a codebook

  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  const int32_t* order = nullptr;     // [head_dim]
  const float* keys = nullptr;        // [num_kv_heads][head_dim / 4][4][256]
  const float* values = nullptr;      // [num_kv_heads][head_dim / 4][256][4]
  const float* value_dims = nullptr;  // the same as keys have them
  // Half of each vector's square: [num_kv_heads][head_dim / 4][256].
  const float* key_squares = nullptr;
  const float* value_squares = nullptr;
  KeyTurns turns = {};

  constexpr int64_t books() const { return int64_t{num_kv_heads} * (head_dim / kDims); }
  constexpr int64_t book(int64_t head, int64_t group) const {
    return head * (head_dim / kDims) + group;
  }
};

}  // namespace effinfer::ops
