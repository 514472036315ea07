// The tables of ops/page_codebooks.h that a pool's coded pages need, of KvCoding::codebooks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "effinfer/kv_cache.h"
#include "kv/key_turn_tables.h"
#include "ops/page_codebooks.h"

namespace effinfer::kv {

// Throws InvalidArgument for codebooks that the config's layers cannot have, Unsupported where it
// does not say how keys are rotated.
void check_codebooks(const KvCacheConfig& config);

class CodebookTables {
 public:
  // Of a checked config, for pages of sequences with at most so many.
  CodebookTables(const KvCacheConfig& config, int32_t num_places);

  const ops::PageCodebooks& layer(size_t number) const { return layers_[number]; }

 private:
  // Of one layer's keys, or values: the vectors, their dimensions apart, half of their squares.
  struct Books {
    std::vector<float> vectors;
    std::vector<float> dims;
    std::vector<float> squares;
  };
  const Books& add_books(const uint16_t* from, const ops::PageCodebooks& layer);

  KeyTurnTables turns_;
  std::vector<ops::PageCodebooks> layers_;
  std::deque<std::vector<int32_t>> orders_;
  std::deque<Books> books_;
};

}  // namespace effinfer::kv
