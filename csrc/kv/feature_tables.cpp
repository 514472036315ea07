#include "kv/feature_tables.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/float16.h"
#include "effinfer/error.h"

namespace effinfer::kv {
namespace {

constexpr int64_t kTokens = 64;  // of a page

int64_t dims_of(const KvCacheConfig& config) {
  return int64_t{config.num_kv_heads} * config.head_dim;
}

// Of a position, rounded once.
struct Angle {
  float cos;
  float sin;
  Angle(int64_t position, float frequency) {
    const double angle = static_cast<double>(position) * static_cast<double>(frequency);
    cos = static_cast<float>(std::cos(angle));
    sin = static_cast<float>(std::sin(angle));
  }
};

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
  if (config.rope.size() != static_cast<size_t>(config.num_layers)) {
    throw Unsupported("[kv_cache] coding.features: the config does not say how keys are rotated");
  }
}

FeatureTables::FeatureTables(const KvCacheConfig& config, int32_t num_places) {
  for (size_t number = 0; number < static_cast<size_t>(config.num_layers); ++number) {
    ops::PageFeatures layer;
    layer.num_kv_heads = config.num_kv_heads;
    layer.head_dim = config.head_dim;
    layer.count = config.coding.features;
    layer.shared_layers = config.coding.shared_layers;
    layer.num_places = num_places;
    set_basis(config, number, layer);
    const KvRope& rope = config.rope[number];
    const KvRope* before = number > 0 ? &config.rope[number - 1] : nullptr;
    if (before != nullptr && before->inv_freq == rope.inv_freq &&
        before->interleaved == rope.interleaved) {
      const ops::PageFeatures& same = layers_.back();
      layer.num_pairs = same.num_pairs;
      layer.interleaved = same.interleaved;
      layer.place_cos = same.place_cos;
      layer.place_sin = same.place_sin;
      layer.token_cos = same.token_cos;
      layer.token_sin = same.token_sin;
    } else {
      set_angles(rope, layer);
    }
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

void FeatureTables::set_angles(const KvRope& rope, ops::PageFeatures& layer) {
  layer.num_pairs = static_cast<int32_t>(rope.inv_freq.size());
  layer.interleaved = rope.interleaved;
  Angles& angles = angles_.emplace_back();
  for (int64_t place = 0; place < layer.num_places; ++place) {
    for (const float frequency : rope.inv_freq) {
      const Angle angle(place * kTokens, frequency);
      angles.place_cos.push_back(angle.cos);
      angles.place_sin.push_back(angle.sin);
    }
  }
  for (const float frequency : rope.inv_freq) {
    for (int64_t token = 0; token < kTokens; ++token) {
      const Angle angle(token, frequency);
      angles.token_cos.push_back(angle.cos);
      angles.token_sin.push_back(angle.sin);
    }
  }
  layer.place_cos = angles.place_cos.data();
  layer.place_sin = angles.place_sin.data();
  layer.token_cos = angles.token_cos.data();
  layer.token_sin = angles.token_sin.data();
}

}  // namespace effinfer::kv
