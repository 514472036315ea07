#include "kv/feature_tables.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/float16.h"
#include "effinfer/error.h"

namespace effinfer::kv {
namespace {

int64_t dims_of(const KvCacheConfig& config) {
  return int64_t{config.num_kv_heads} * config.head_dim;
}

}  // namespace

void check_features(const KvCacheConfig& config) {
  const KvCoding& coding = config.coding;
  const auto fail = [](const char* field, const std::string& expected, int64_t got) {
    throw InvalidArgument(std::string("[kv_cache] coding.") + field + ": expected " + expected +
                          ", got " + std::to_string(got));
  };
  const int64_t numbers = coding.basis ? static_cast<int64_t>(coding.basis->size()) : 0;
  const int64_t dims = dims_of(config);
  if (coding.shared_layers < 1 || (coding.shared_layers > 1 && coding.features == 0)) {
    fail("shared_layers", "at least 1, and 1 without features", coding.shared_layers);
  }
  const int64_t most = dims * std::min(coding.shared_layers, config.num_layers);
  if (coding.features == 0) {
    if (numbers > 0) fail("basis", "none without features", numbers);
    return;
  }
  const ops::PageFeatures shape = {.count = coding.features};
  if (coding.features < 0 || coding.features > most ||
      coding.features % (16 * shape.num_parts()) != 0) {
    fail("features",
         "a multiple of 16 in each of equal parts of at most " +
             std::to_string(ops::PageFeatures::kMostPart) + ", at most " + std::to_string(most),
         coding.features);
  }
  const int64_t expected = int64_t{config.num_layers} * 2 * coding.features * dims;
  if (numbers != expected) {
    fail("basis",
         std::to_string(expected) + " numbers, of keys and values of " +
             std::to_string(config.num_layers) + " encoded layers with " + std::to_string(dims) +
             " dimensions",
         numbers);
  }
  const auto& basis = *coding.basis;
  if (!std::all_of(basis.begin(), basis.end(),
                   [](uint16_t x) { return std::isfinite(bf16_to_f32(x)); })) {
    throw InvalidArgument("[kv_cache] coding.basis: expected finite numbers");
  }
  require_rotations(config, "features");
}

FeatureTables::FeatureTables(const KvCacheConfig& config, int32_t num_places)
    : turns_(config, num_places) {
  for (size_t number = 0; number < static_cast<size_t>(config.num_layers); ++number) {
    ops::PageFeatures layer;
    layer.num_kv_heads = config.num_kv_heads;
    layer.head_dim = config.head_dim;
    layer.count = config.coding.features;
    layer.shared_layers = config.coding.shared_layers;
    layer.turns = turns_.layer(number);
    set_basis(config, number, layer);
    layers_.push_back(layer);
  }
}

void FeatureTables::set_basis(const KvCacheConfig& config, size_t number,
                              ops::PageFeatures& layer) {
  const auto count = static_cast<size_t>(layer.count);
  const auto dims = static_cast<size_t>(layer.dims());
  const auto take = [&](size_t index, const float*& rows, const float*& columns) {
    const uint16_t* from = config.coding.basis->data() + (2 * number + index) * count * dims;
    std::vector<float>& to = bases_.emplace_back(count * dims);
    std::vector<float>& transposed = bases_.emplace_back(count * dims);
    for (size_t i = 0; i < count * dims; ++i) {
      to[i] = bf16_to_f32(from[i]);
      transposed[i % dims * count + i / dims] = to[i];
    }
    rows = to.data();
    columns = transposed.data();
  };
  take(0, layer.keys, layer.key_dims);
  take(1, layer.values, layer.value_dims);
}

}  // namespace effinfer::kv
