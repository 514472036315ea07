#include "kv/groups.h"

#include <algorithm>
#include <string>

#include "effinfer/error.h"

namespace effinfer::kv {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw InvalidArgument("[kv_cache] groups: expected " + what);
}

void check(const KvCacheConfig& config) {
  const size_t devices = config.layer_devices.size();
  if (devices != 0 && static_cast<int64_t>(devices) != config.num_layers) {
    throw InvalidArgument("[kv_cache] layer_devices: expected none or one a layer, got " +
                          std::to_string(devices));
  }
  if (config.groups.empty()) return;
  if (config.groups.size() > kMostGroups) {
    fail("at most " + std::to_string(kMostGroups) + ", got " +
         std::to_string(config.groups.size()));
  }
  if (num_whole_groups(config) > 1 && config.coding.bits != 0) {
    throw Unsupported("[kv_cache] groups: expected one without a window beside coding, got " +
                      std::to_string(num_whole_groups(config)));
  }
  std::vector<int> seen(static_cast<size_t>(std::max(config.num_layers, 0)), 0);
  int32_t whole = 0;  // behind the last layer without a window so far
  for (size_t group = 0; group < config.groups.size(); ++group) {
    const KvGroup& given = config.groups[group];
    const bool window = given.window_left >= 0;
    if (given.layers.empty() || (window ? group == 0 : group >= num_whole_groups(config))) {
      fail("layers in each, and those without a window, at least one, before the others");
    }
    int32_t least = window ? 0 : whole;
    for (const int32_t layer : given.layers) {
      if (layer < least || layer >= config.num_layers) {
        fail("ascending layers of 0.." + std::to_string(config.num_layers - 1) + ", got " +
             std::to_string(layer));
      }
      least = layer + 1;
      ++seen[static_cast<size_t>(layer)];
    }
    if (!window) whole = least;
  }
  for (const int count : seen) {
    if (count != 1) fail("every layer in one of them");
  }
}

int64_t group_heads(const KvCacheConfig& config, size_t group) {
  const auto layers = config.groups.empty() ? static_cast<size_t>(config.num_layers)
                                            : config.groups[group].layers.size();
  return static_cast<int64_t>(layers) * config.num_kv_heads;
}

}  // namespace

std::vector<std::unique_ptr<PagePool>> make_pools(const KvCacheConfig& config) {
  check(config);
  std::vector<std::unique_ptr<PagePool>> pools;
  KvCacheConfig part = config;
  part.groups.clear();
  const bool knows_rope = config.rope.size() == static_cast<size_t>(config.num_layers);
  const bool knows_devices = !config.layer_devices.empty();
  if (config.groups.empty()) pools.push_back(std::make_unique<PagePool>(part));
  for (const KvGroup& group : config.groups) {
    part.num_layers = static_cast<int32_t>(group.layers.size());
    part.rope.clear();
    part.layer_devices.clear();
    for (const int32_t layer : group.layers) {
      if (knows_rope) part.rope.push_back(config.rope[static_cast<size_t>(layer)]);
      if (knows_devices) part.layer_devices.push_back(config.device_of(layer));
    }
    if (group.window_left >= 0) part.coding = {};
    part.index_unit = group.window_left < 0 || group.indexed ? config.index_unit : 0;
    part.index_bits = group.window_left < 0 ? config.index_bits : 0;  // what hashes has none
    pools.push_back(std::make_unique<PagePool>(part));
  }
  return pools;
}

std::vector<ops::KvLayer> layers_of(std::span<const std::unique_ptr<PagePool>> pools,
                                    const KvCacheConfig& config) {
  const auto& first = pools.front()->layers();
  if (config.groups.empty()) return {first.begin(), first.end()};
  std::vector<ops::KvLayer> layers(static_cast<size_t>(config.num_layers));
  for (size_t group = 0; group < config.groups.size(); ++group) {
    size_t next = 0;
    for (const int32_t layer : config.groups[group].layers) {
      layers[static_cast<size_t>(layer)] = pools[group]->layers()[next++];
    }
  }
  return layers;
}

std::vector<uint8_t> group_of_layer(const KvCacheConfig& config) {
  std::vector<uint8_t> groups;
  if (config.groups.size() < 2) return groups;
  groups.resize(static_cast<size_t>(config.num_layers));
  for (size_t group = 0; group < config.groups.size(); ++group) {
    for (const int32_t layer : config.groups[group].layers) {
      groups[static_cast<size_t>(layer)] = static_cast<uint8_t>(group);
    }
  }
  return groups;
}

size_t num_whole_groups(const KvCacheConfig& config) {
  if (config.groups.empty()) return 1;
  const auto has_window = [](const KvGroup& group) { return group.window_left >= 0; };
  const auto end = std::ranges::find_if(config.groups, has_window);
  return static_cast<size_t>(end - config.groups.begin());
}

std::vector<int64_t> plane_heads(const KvCacheConfig& config) {
  std::vector<int64_t> heads = {0};
  for (size_t group = 0; group < num_whole_groups(config); ++group) {
    heads.push_back(heads.back() + group_heads(config, group));
  }
  return heads;
}

int64_t num_plane_heads(const KvCacheConfig& config) {
  int64_t heads = 0;
  for (size_t group = 0; group < num_whole_groups(config); ++group) {
    heads += group_heads(config, group);
  }
  return heads;
}

std::vector<int64_t> windows_of(const KvCacheConfig& config) {
  std::vector<int64_t> windows;
  for (const KvGroup& group : config.groups) windows.push_back(group.window_left);
  if (windows.empty()) windows.push_back(-1);
  return windows;
}

}  // namespace effinfer::kv
