// What the drivers of hash_index and bucket_index hand to an ISA level: codes of a page's keys and
// of queries, which keys collide, and what cosines are made of.
#pragma once

#include <cstdint>

#include "cpu/page_index.h"
#include "ops/hash_tables.h"
#include "ops/kv_layout.h"

namespace effinfer::cpu {

// The keys of a page that are hashed, less a mean, with the hyperplanes of ops/hash_tables.h.
struct HashedPage {
  KeyShape shape;
  PageKeys keys;
  const float* mean;    // [head_dim]
  const float* planes;  // [num_planes][head_dim]
  int64_t num_planes;   // a multiple of 8
};

// 16 keys of a page and the query heads of a row.
struct KeyAngles {
  KeyShape shape;
  PageKeys keys;
  int64_t first;  // of the keys, a multiple of 16
  const float* mean;
  const float* q;  // [group][head_dim]
  int32_t group;
  float* products;  // [group][16], with the keys less the mean
  float* squares;   // [16], their own
};

struct HashIndexKernels {
  // [num_planes] words: bit t is that of token t. `scratch` has hash_scratch_floats().
  void (*hash)(const HashedPage&, float* scratch, uint64_t* words);
  // Adds a page's keys to sums [head_dim].
  void (*add_keys)(const KeyShape&, const PageKeys&, float* sums);
  // Of the query heads q [group][head_dim] the bits that their own planes give, as words of
  // inverted bits: all are set where it is 0.
  void (*hash_queries)(const float* q, int64_t head_dim, const float* planes,
                       const ops::HashShape& shape, uint64_t* words);
  // The tokens of a page that collide with some head in two tables of its own.
  uint64_t (*collide)(const uint64_t* page, const uint64_t* queries, const ops::HashShape& shape);
  void (*measure)(const KeyAngles&);
};

// The keys of a page as floats.
inline constexpr int64_t hash_scratch_floats(int64_t head_dim) {
  return ops::kPageSize * head_dim;
}

}  // namespace effinfer::cpu
