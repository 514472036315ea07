// The tables of ops/page_features.h that a pool's coded pages need, of KvCoding::basis.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "effinfer/kv_cache.h"
#include "kv/key_turn_tables.h"
#include "ops/page_features.h"

namespace effinfer::kv {

// Throws InvalidArgument for features or a basis that the config's layers cannot have, Unsupported
// where it does not say how keys are rotated.
void check_features(const KvCacheConfig& config);

class FeatureTables {
 public:
  // Of a checked config, for pages of sequences with at most so many.
  FeatureTables(const KvCacheConfig& config, int32_t num_places);

  const ops::PageFeatures& layer(size_t number) const { return layers_[number]; }

 private:
  void set_basis(const KvCacheConfig& config, size_t number, ops::PageFeatures& layer);

  KeyTurnTables turns_;
  std::vector<ops::PageFeatures> layers_;
  std::deque<std::vector<float>> bases_;
};

}  // namespace effinfer::kv
