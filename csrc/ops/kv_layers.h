// Layers of a cache whose memory one device has, at equal distances: one launch for all of them.
#pragma once

#include <cstdint>

#include "ops/kv_layout.h"

namespace effinfer::ops {

struct KvLayers {
  KvLayer first;
  int64_t stride = 0;  // bytes from a layer's keys to the next one's, and so for values and scales
  int32_t count = 0;

  // (layer, KV head), which kernels number with layers first.
  constexpr int64_t num_heads() const { return int64_t{count} * first.num_kv_heads; }
};

struct TokenPlace {
  int32_t page;
  int32_t token;  // of the page
};

}  // namespace effinfer::ops
