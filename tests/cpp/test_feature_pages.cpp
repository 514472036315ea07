// Coded pages of features: how near these are to the keys and values that they are made of, and
// attention over them, beside attention in double precision over what their codes stand for.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "core/backend.h"
#include "expanded_model.h"
#include "kv/coded_store.h"
#include "kv/feature_tables.h"
#include "kv/page_pool.h"

using namespace effinfer;
using namespace effinfer::coded;

namespace {

struct Shape {
  DType dtype;
  int32_t bits;
  int32_t heads;
  int32_t dim;
  int32_t features;
  Turn turn;
  int32_t layers;  // that share them
};

// Layers' pages of both kinds.
class FeaturePages {
 public:
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

// Codes are the nearest ones to features in double precision, but for what rounding features to
// float32 and a range's ends to binary16 moves them.
void check_codes(const FeaturePages& all, const Variant<EncodePagesProblem>& variant) {
  const Shape& shape = all.shape;
  const double most_code = (1 << shape.bits) - 1;
  double worst = 0;
  for (int32_t page = 0; page < FeaturePages::kPages; ++page) {
    for (int64_t t = 0; t < kPageSize; ++t) {
      std::vector<double> numbers[2];
      for (const BothKinds& layer : all.layers) {
        for (int64_t head = 0; head < shape.heads; ++head) {
          for (int64_t d = 0; d < shape.dim; ++d) {
            numbers[0].push_back(layer.key(page, head, t, d));
            numbers[1].push_back(layer.value(page, head, t, d));
          }
          shape.turn.apply(FeaturePages::place(page) * kPageSize + t, -1.0,
                           numbers[0].data() + numbers[0].size() - shape.dim);
        }
      }
      for (int which = 0; which < 2; ++which) {
        for (int64_t f = 0; f < shape.features; ++f) {
          double exact = 0, magnitude = 0;
          for (int64_t d = 0; d < shape.layers * all.dims(); ++d) {
            const double product = all.basis(d / all.dims(), which, f, d % all.dims()) *
                                   numbers[which][FeaturePages::index(d)];
            exact += product;
            magnitude += 2 * std::abs(product);
          }
          const CodedReader::Number found = all.coded(which, page, t, f);
          const double ends = (std::abs(exact) + 2 * most_code * found.step) * 0x1p-10 + 0x1p-24;
          const double bound =
              found.step * (0.5 + 0x1p-16) + ends + shape.layers * all.dims() * kFloat * magnitude;
          worst = std::max(worst, std::abs(found.value - exact) / bound);
        }
      }
    }
  }
  if (worst > 1.0) check::fail(variant.name.c_str(), worst, "features are too far away");
}

Expanded expand(const FeaturePages& all, int64_t layer) {
  const Shape& shape = all.shape;
  const double most_code = (1 << shape.bits) - 1;
  Expanded made;
  for (int32_t page = 0; page < FeaturePages::kPages; ++page) {
    for (int64_t t = 0; t < kPageSize; ++t) {
      const size_t first = made.keys.size();
      for (int64_t d = 0; d < all.dims(); ++d) {
        Expanded::Number key = {0, 0}, value = {0, 0};
        double largest = 0, magnitude = 0;
        for (int64_t f = 0; f < shape.features; ++f) {
          const CodedReader::Number k = all.coded(0, page, t, f);
          const CodedReader::Number v = all.coded(1, page, t, f);
          const double of_key = all.basis(layer, 0, f, d);
          key.value += of_key * k.value;
          magnitude += std::abs(of_key) * (std::abs(k.value) + 2 * most_code * k.step);
          largest = std::max(largest, std::abs(of_key) * k.step);
          value.value += all.basis(layer, 1, f, d) * v.value;
          value.off +=
              std::abs(all.basis(layer, 1, f, d)) * (std::abs(v.value) + 2 * most_code * v.step);
        }
        key.off = shape.features * (most_code * largest * kHalfUnit + kFloat * magnitude);
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

const Shape kShapes[] = {
    {DType::bf16, 4, 2, 64, 96, {32, false}, 1},   {DType::f32, 4, 3, 16, 32, {8, true}, 2},
    {DType::bf16, 2, 3, 64, 128, {32, true}, 1},   {DType::f32, 2, 5, 80, 288, {20, false}, 1},
    {DType::bf16, 4, 1, 256, 64, {128, false}, 1}, {DType::f32, 4, 2, 48, 96, {0, false}, 3},
};

}  // namespace

TEST("features have the nearest codes") {
  std::mt19937 random(1);
  ThreadPool pool(2);
  for (const Shape& shape : kShapes) {
    FeaturePages all(shape, random);
    for (const auto& variant : table<EncodePagesProblem>().variants()) {
      if (variant.isa > current_isa()) continue;
      std::fill(all.codes.begin(), all.codes.end(), uint8_t{0xa5});
      all.encode(variant, pool);
      check_codes(all, variant);
    }
  }
}

// Of each sequence the first and the last row.
static void check_attention(const FeaturePages& all, size_t layer, ThreadPool& pool,
                            std::mt19937& random) {
  const BothKinds& pages = all.layers[layer];
  const Expanded coded = expand(all, static_cast<int64_t>(layer));
  const Batch batch = random_batch(FeaturePages::kPages, random);
  int compared = 0;
  for (const Arithmetic arithmetic : {Arithmetic::f32, Arithmetic::bf16}) {
    Call call(pages, batch, 2 * all.shape.heads, arithmetic, random);
    for (const auto& variant : table<AttentionProblem>().variants()) {
      if (refusal(variant, call.problem, current_target()) != nullptr) continue;
      const std::vector<float> got = call.run(variant, pool);
      for (size_t s = 0; s < batch.kv_len.size(); ++s) {
        for (const int32_t row : {batch.qo_indptr[s], batch.qo_indptr[s + 1] - 1}) {
          const float* first = got.data() + row * call.problem.out_stride;
          const double worst = worst_of_row(pages, coded, batch, call, s, row, first);
          if (worst > 1.0) check::fail(variant.name.c_str(), worst, "a row is too far away");
        }
      }
      ++compared;
    }
  }
  CHECK(compared > 0);
}

TEST("attention over pages of features is that of what these stand for") {
  std::mt19937 random(2);
  ThreadPool pool(2);
  for (const Shape& shape : kShapes) {
    FeaturePages all(shape, random);
    all.encode(table<EncodePagesProblem>().variants().front(), pool);
    for (size_t i = 0; i < all.layers.size(); ++i) check_attention(all, i, pool, random);
  }
}

TEST("a batch may name the pages that layers without a window have, however many share features") {
  for (const int32_t shared : {1, 3, 4, 5, std::numeric_limits<int32_t>::max()}) {
    KvCacheConfig config;
    config.num_layers = 4;
    config.num_kv_heads = 1;
    config.head_dim = 64;
    config.num_pages = 100;
    config.coding.bits = 4;
    config.coding.features = 32;
    config.coding.shared_layers = shared;
    config.coding.basis = std::make_shared<std::vector<uint16_t>>(4 * 2 * 32 * 64);
    config.rope.resize(4);
    const size_t bytes = static_cast<size_t>(config.num_pages) * kv::page_bytes(config);
    const kv::CodedStore store(config, bytes);
    CHECK(store.num_coded() > config.num_pages);
    KvCacheConfig whole = config;
    whole.num_layers = 26;
    whole.groups = {{{5, 11, 17, 23}}, {{}, 512}};
    CHECK(kv::num_page_ids(whole) == config.num_pages + store.num_coded());
  }
}

CHECK_MAIN()
