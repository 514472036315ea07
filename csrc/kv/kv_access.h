// The pages of a KV cache as kernels see them. The public class has no method for it.
#pragma once

#include <span>

#include "effinfer/export.h"
#include "effinfer/kv_cache.h"
#include "ops/kv_layout.h"

namespace effinfer {

struct EFFINFER_API KvCacheAccess {
  static std::span<const ops::KvLayer> layers(const KvCache& cache);
};

}  // namespace effinfer
