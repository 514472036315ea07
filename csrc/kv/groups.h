// Groups of layers: what a config says of them, checked, and the pools of their pages.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "effinfer/kv_cache.h"
#include "kv/page_pool.h"

namespace effinfer::kv {

// Steps have room for their tables, and name a group in a byte.
inline constexpr size_t kMostGroups = 255;

// A pool for each group, whose layers are numbered anew. Throws InvalidArgument unless every layer
// is in one group, and those without a window come first, their layers in order.
std::vector<std::unique_ptr<PagePool>> make_pools(const KvCacheConfig& config);
// By layer of the model.
std::vector<ops::KvLayer> layers_of(std::span<const std::unique_ptr<PagePool>> pools,
                                    const KvCacheConfig& config);
// Empty: all layers are in one group.
std::vector<uint8_t> group_of_layer(const KvCacheConfig& config);
// The first ones, which are without a window; at least one.
size_t num_whole_groups(const KvCacheConfig& config);
// By whole group the heads of a plane before its own, and behind the last one all of them.
std::vector<int64_t> plane_heads(const KvCacheConfig& config);
// All of them.
int64_t num_plane_heads(const KvCacheConfig& config);
// window_left by group.
std::vector<int64_t> windows_of(const KvCacheConfig& config);

}  // namespace effinfer::kv
