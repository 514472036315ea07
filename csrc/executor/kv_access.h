// The pages of a KV cache as kernels see them. The public class has no method for it.
#pragma once

#include "effinfer/export.h"
#include "effinfer/kv_cache.h"
#include "ops/kv_layout.h"

namespace effinfer {

struct EFFINFER_API KvCacheAccess {
  // Throws InvalidArgument for a layer that the cache lacks.
  static ops::KvLayer layer(const KvCache& cache, int32_t index);
};

}  // namespace effinfer
