// Coded pages of features (ops/page_features.h) of layers that share them, and what these stand
// for.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "expanded_model.h"
#include "kv/feature_tables.h"

namespace effinfer::coded {

// Layers' pages of both kinds.
class FeaturePages {
 public:
  struct Shape {
    DType dtype;
    int32_t bits;
    int32_t heads;
    int32_t dim;
    int32_t features;
    Turn turn;
    int32_t layers;  // that share them
  };

  static constexpr int32_t kPages = 5;
  const Shape shape;
  std::vector<BothKinds> layers;
  std::vector<uint8_t> codes;

  FeaturePages(const Shape& given, std::mt19937& random) : shape(given) {
    make_tables(random);
    layers.reserve(index(shape.layers));
    for (int32_t i = 0; i < shape.layers; ++i) {
      layers.emplace_back(given.dtype, given.bits, kPages, given.heads, given.dim, random);
      CodedPages& coded = layers.back().layer.coded;
      coded.features = &tables_->layer(index(i));
      coded.num_kv_heads = coded.features->num_parts();
      coded.head_dim = coded.features->part_count();
      codes.resize(coded.head_bytes() * index(kPages * coded.num_kv_heads));
      coded.data = codes.data();
    }
  }

  void encode(const Variant<EncodePagesProblem>& variant, ThreadPool& pool) {
    std::vector<PageCoding> all;
    for (int32_t i = 0; i < kPages; ++i) all.push_back({i, kPages + i, place(i)});
    std::vector<KvLayer> given;
    for (const BothKinds& layer : layers) given.push_back(layer.layer);
    const EncodePagesProblem problem = {given.data(), shape.layers, all.data(), kPages};
    CHECK(variant.rejects(problem) == nullptr);
    pool.parallel([&](Team& team) { variant.run(problem, team); });
  }

  int32_t dims() const { return shape.heads * shape.dim; }
  static int32_t place(int32_t page) { return page * 17 % 90; }
  // Of a layer's keys (0) and values (1), a feature's part of a dimension of all heads.
  double basis(int64_t layer, int which, int64_t feature, int64_t dim) const {
    return basis_[index(((layer * 2 + which) * shape.features + feature) * dims() + dim)];
  }
  CodedReader reader(int32_t page, int64_t feature) const {
    const CodedPages& coded = layers[0].layer.coded;
    return {coded, kPages + page, feature / coded.head_dim};
  }
  CodedReader::Number coded(int which, int32_t page, int64_t token, int64_t feature) const {
    const int64_t own = feature % layers[0].layer.coded.head_dim;
    const CodedReader from = reader(page, feature);
    return which == 0 ? from.key(token, own) : from.value(token, own);
  }

  static size_t index(int64_t i) { return static_cast<size_t>(i); }

 private:
  void make_tables(std::mt19937& random) {
    basis_.resize(index(shape.layers * 2 * shape.features * dims()));
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(dims())));
    auto bits = std::make_shared<std::vector<uint16_t>>();
    for (double& number : basis_) {
      bits->push_back(f32_to_bf16(normal(random)));
      number = bf16_to_f32(bits->back());
    }
    KvCacheConfig config;
    config.num_layers = shape.layers;
    config.num_kv_heads = shape.heads;
    config.head_dim = shape.dim;
    config.coding.bits = shape.bits;
    config.coding.features = shape.features;
    config.coding.shared_layers = shape.layers;
    config.coding.basis = bits;
    config.rope.assign(index(shape.layers), shape.turn.rope());
    kv::check_features(config);
    tables_ = std::make_unique<kv::FeatureTables>(config, 100);
  }

  std::vector<double> basis_;
  std::unique_ptr<kv::FeatureTables> tables_;
};

// `half_unit`: of the integers that codes are multiplied with.
inline Expanded expand(const FeaturePages& all, int64_t layer, double half_unit = kHalfUnit) {
  const FeaturePages::Shape& shape = all.shape;
  const double most_code = (1 << shape.bits) - 1;
  Expanded made;
  std::vector<CodedReader::Number> numbers[2];  // of a token
  for (int32_t page = 0; page < FeaturePages::kPages; ++page) {
    for (int64_t t = 0; t < kPageSize; ++t) {
      for (int which = 0; which < 2; ++which) {
        numbers[which].clear();
        for (int64_t f = 0; f < shape.features; ++f) {
          numbers[which].push_back(all.coded(which, page, t, f));
        }
      }
      const size_t first = made.keys.size();
      for (int64_t d = 0; d < all.dims(); ++d) {
        Expanded::Number key = {0, 0}, value = {0, 0};
        double largest = 0, magnitude = 0;
        for (int64_t f = 0; f < shape.features; ++f) {
          const CodedReader::Number k = numbers[0][FeaturePages::index(f)];
          const CodedReader::Number v = numbers[1][FeaturePages::index(f)];
          const double of_key = all.basis(layer, 0, f, d);
          key.value += of_key * k.value;
          magnitude += std::abs(of_key) * (std::abs(k.value) + 2 * most_code * k.step);
          largest = std::max(largest, std::abs(of_key) * k.step);
          value.value += all.basis(layer, 1, f, d) * v.value;
          value.off +=
              std::abs(all.basis(layer, 1, f, d)) * (std::abs(v.value) + 2 * most_code * v.step);
        }
        key.off = shape.features * (most_code * largest * half_unit + kFloat * magnitude);
        made.keys.push_back(key);
        made.values.push_back(value);
      }
      for (int64_t head = 0; head < shape.heads; ++head) {
        Expanded::Number* own = &made.keys[first + FeaturePages::index(head * shape.dim)];
        turn_key(shape.turn, FeaturePages::place(page) * kPageSize + t, shape.dtype == DType::bf16,
                 shape.dim, own);
      }
    }
  }
  return made;
}

}  // namespace effinfer::coded
