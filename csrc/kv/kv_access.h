// The pages of a KV cache as kernels see them. The public class has no method for it.
#pragma once

#include <cstdint>
#include <span>

#include "effinfer/export.h"
#include "effinfer/kv_cache.h"
#include "ops/kv_layout.h"

namespace effinfer {

struct EFFINFER_API KvCacheAccess {
  static std::span<const ops::KvLayer> layers(const KvCache& cache);
  // Empty: all layers have one page table.
  static std::span<const uint8_t> group_of_layer(const KvCache& cache);
};

}  // namespace effinfer
