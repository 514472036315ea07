// Coded pages of features: how near these are to the keys and values that they are made of, and
// attention over them, beside attention in double precision over what their codes stand for.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "core/backend.h"
#include "feature_pages.h"
#include "kv/coded_store.h"
#include "kv/page_pool.h"

using namespace effinfer;
using namespace effinfer::coded;

namespace {

using Shape = FeaturePages::Shape;

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
