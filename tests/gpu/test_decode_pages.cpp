// Coded pages on the GPU as attention reads them, beside what codes stand for in float64.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "cpp/codebook_pages.h"
#include "cpp/feature_pages.h"
#include "cuda/decode_pages.h"
#include "gpu/device_arrays.h"
#include "gpu/mutations.h"
#include "kv/device_tables.h"

namespace effinfer {
namespace {

using coded::BothKinds;
using coded::CodebookPages;
using coded::Expanded;
using coded::FeaturePages;

struct Case {
  DType dtype;
  int32_t bits;
  int32_t heads;
  int32_t dim;
  int32_t rank = 0;
  int32_t outliers = 0;
};

// Layers' coded pages as parts of a GPU's pages, which other layers have slots of, too.
class CodedParts {
 public:
  static constexpr int32_t kPages = 5;  // that are encoded, and of the pool
  // Those that are decoded, in this order, behind one that is none.
  static constexpr int32_t kOrder[] = {3, 0, 4, 1};

  // `coded`: the host's; `kv`: the layer that it is of.
  CodedParts(const ops::KvLayer& kv, const ops::CodedPages& coded, std::mt19937& random)
      : kv_(kv), coded_(coded) {
    const auto heads = static_cast<size_t>(coded.num_kv_heads);
    const auto layer_parts =
        static_cast<int32_t>(plane() / (heads * std::max(coded.key_bytes(), coded.behind_keys())));
    CHECK(layer_parts > 0);
    const size_t layer = 2 * kPages * plane();
    pool_ = DeviceArray<uint8_t>(2 * layer);
    coded_.data = nullptr;
    coded_.memory = {pool_.data(),
                     pool_.data() + kPages * plane(),
                     static_cast<int64_t>(plane()),
                     static_cast<int64_t>(layer),
                     layer_parts,
                     2 * layer_parts};
    std::vector<int32_t> places(static_cast<size_t>(kPages * 2 * layer_parts));
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), random);
    numbers_.assign(places.begin(), places.begin() + kPages);
    for (int32_t page = 0; page < kPages; ++page) {
      const int32_t id = coded_.first_page + numbers_[static_cast<size_t>(page)];
      for (int32_t head = 0; head < coded.num_kv_heads; ++head) {
        const uint8_t* from = coded.head(coded.first_page + page, head);
        memory_of(kGpu).copy(coded_.keys_of(id, head), from, coded.key_bytes());
        memory_of(kGpu).copy(coded_.values_of(id, head), from + coded.key_bytes(),
                             coded.behind_keys());
      }
    }
  }
  void set_features(const ops::PageFeatures* there) { coded_.features = there; }
  void set_codebooks(const ops::PageCodebooks* there) { coded_.codebooks = there; }

  struct Pages {
    std::vector<uint8_t> keys, values;
  };
  Pages decode() const {
    std::vector<int32_t> numbers{-1};
    for (const int32_t page : kOrder) numbers.push_back(numbers_[static_cast<size_t>(page)]);
    const DeviceArray<int32_t> there(numbers);
    const DeviceArray<uint8_t> k(numbers.size() * plane()), v(numbers.size() * plane());
    ops::AttentionProblem p;
    p.k = ops::keys_of(kv_);
    p.num_kv_heads = kv_.num_kv_heads;
    p.coded = coded_;
    p.decoded = {there.data(), static_cast<int32_t>(numbers.size()), k.data(), v.data()};
    const std::unique_ptr<Queue> queue = make_queue(kGpu);
    cuda::launch_decode_pages(p, *queue);
    queue->wait();
    return {k.values(), v.values()};
  }

  // key(page, head, token, dim), value(...): what they are, and by how much they may differ.
  template <class Key, class Value>
  bool are_right(const Pages& got, Key&& key, Value&& value) const {
    const auto is_untouched = [&](const std::vector<uint8_t>& pages) {
      const auto end = pages.begin() + static_cast<std::ptrdiff_t>(plane());
      return std::all_of(pages.begin(), end, [](uint8_t byte) { return byte == 0xff; });
    };
    double worst = 0;
    const auto compare = [&](const uint8_t* head, int64_t place, const Expanded::Number& expected) {
      const double error = std::abs(number(head, place) - expected.value);
      worst = std::max(worst, error <= expected.off ? 0.0 : 2.0);
    };
    const int64_t share = kv_.dtype == DType::f32 ? 1 : 2;
    size_t first = plane();
    for (const int32_t page : kOrder) {
      for (int32_t head = 0; head < kv_.num_kv_heads; ++head, first += kv_.head_bytes()) {
        for (int64_t t = 0; t < ops::kPageSize; ++t) {
          for (int64_t d = 0; d < kv_.head_dim; ++d) {
            compare(got.keys.data() + first, ops::k_offset(t, d, kv_.head_dim, share),
                    key(page, head, t, d));
            compare(got.values.data() + first, ops::v_offset(t, d, kv_.head_dim, share),
                    value(page, head, t, d));
          }
        }
      }
    }
    return worst <= 1.0 && is_untouched(got.keys) && is_untouched(got.values);
  }
  // Of a result that is rounded to a page's number.
  double rounding(double x) const {
    return (kv_.dtype == DType::f32 ? 0x1p-23 : 0x1p-8) * std::abs(x) + 1e-30;
  }

 private:
  size_t plane() const { return kv_.head_bytes() * static_cast<size_t>(kv_.num_kv_heads); }
  double number(const uint8_t* head, int64_t place) const {
    if (kv_.dtype == DType::f32) return reinterpret_cast<const float*>(head)[place];
    return bf16_to_f32(reinterpret_cast<const uint16_t*>(head)[place]);
  }

  const ops::KvLayer kv_;
  ops::CodedPages coded_;
  DeviceArray<uint8_t> pool_;
  std::vector<int32_t> numbers_;  // of each page
};

const ops::Variant<ops::EncodePagesProblem>& encoder() {
  return ops::table<ops::EncodePagesProblem>().variants().front();
}

class RangeCase {
 public:
  RangeCase(const Case& c, std::mt19937& random)
      : pages_(encoded(c, random)), parts_(pages_.layer, pages_.layer.coded, random) {}

  bool is_right() const {
    const ops::KvLayer& kv = pages_.layer;
    const auto reader = [&](int32_t page, int32_t head) {
      return CodedReader(kv.coded, kv.num_pages + page, head);
    };
    return parts_.are_right(
        parts_.decode(),
        [&](int32_t page, int32_t head, int64_t t, int64_t d) {
          return expected(reader(page, head).key(t, d));
        },
        [&](int32_t page, int32_t head, int64_t t, int64_t d) {
          return expected(reader(page, head).value(t, d));
        });
  }

 private:
  static BothKinds encoded(const Case& c, std::mt19937& random) {
    ThreadPool pool(1);
    BothKinds pages(c.dtype, c.bits, CodedParts::kPages, c.heads, c.dim, random, c.rank,
                    c.outliers);
    pages.encode(encoder(), pool);
    return pages;
  }
  // A start, a code times its step, factors and an outlier are added up and rounded. No term is
  // above the greatest number by more than the codes are.
  Expanded::Number expected(const CodedReader::Number& number) const {
    const ops::CodedPages& coded = pages_.layer.coded;
    const double terms = kLargest + std::abs(number.value) + 2 * number.step * (1 << coded.bits);
    return {number.value, parts_.rounding(number.value) + (4 + coded.rank) * coded::kFloat * terms};
  }
  static constexpr double kLargest = 64.0;  // of what BothKinds draws

  const BothKinds pages_;
  const CodedParts parts_;
};

class FeatureCase {
 public:
  FeatureCase(const FeaturePages::Shape& shape, int64_t layer, std::mt19937& random)
      : pages_(encoded(shape, random)),
        tables_(memory_of(kGpu)),
        parts_(kv(layer), kv(layer).coded, random),
        expected_(expand(pages_, layer, 0.0)) {
    parts_.set_features(&tables_.add(*kv(layer).coded.features));
  }

  bool is_right() const {
    const auto at = [&](int32_t page, int32_t head, int64_t t, int64_t d) {
      return static_cast<size_t>((page * ops::kPageSize + t) * pages_.dims() +
                                 head * pages_.shape.dim + d);
    };
    return parts_.are_right(
        parts_.decode(),
        [&](int32_t page, int32_t head, int64_t t, int64_t d) {
          const Expanded::Number& key = expected_.keys[at(page, head, t, d)];
          return Expanded::Number{key.value, key.off + parts_.rounding(key.value)};
        },
        [&](int32_t page, int32_t head, int64_t t, int64_t d) {
          const Expanded::Number& value = expected_.values[at(page, head, t, d)];
          const double sums = (pages_.shape.features + 2) * coded::kFloat * value.off;
          return Expanded::Number{value.value, sums + parts_.rounding(value.value)};
        });
  }

 private:
  static FeaturePages encoded(const FeaturePages::Shape& shape, std::mt19937& random) {
    ThreadPool pool(1);
    FeaturePages pages(shape, random);
    pages.encode(encoder(), pool);
    return pages;
  }
  const ops::KvLayer& kv(int64_t layer) const {
    return pages_.layers[static_cast<size_t>(layer)].layer;
  }

  const FeaturePages pages_;
  kv::DeviceTables tables_;
  CodedParts parts_;
  const Expanded expected_;
};

bool are_vectors_right(const CodebookPages::Shape& shape, std::mt19937& random) {
  ThreadPool pool(1);
  CodebookPages pages(shape, random);
  pages.encode(encoder(), pool);
  const ops::KvLayer& kv = pages.pages.layer;
  kv::DeviceTables tables(memory_of(kGpu));
  CodedParts parts(kv, kv.coded, random);
  parts.set_codebooks(&tables.add(*kv.coded.codebooks));
  const Expanded all = expand(pages);
  const auto number = [&](const std::vector<Expanded::Number>& numbers) {
    return [&](int32_t page, int32_t head, int64_t t, int64_t d) {
      const int64_t row = (page * ops::kPageSize + t) * shape.heads + head;
      const Expanded::Number& x = numbers[static_cast<size_t>(row * shape.dim + d)];
      return Expanded::Number{x.value, x.off + parts.rounding(x.value)};
    };
  };
  return parts.are_right(parts.decode(), number(all.keys), number(all.values));
}

}  // namespace

TEST("codes, factors and outliers") {
  std::mt19937 random(1);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int32_t bits : {4, 2}) {
      for (const int32_t dim : {16, 64, 80, 128, 256}) {
        for (const auto& [rank, outliers] : {std::pair{0, 0}, {2, 0}, {0, 20}, {3, 9}}) {
          // Of small heads that is more than their pages take.
          if (dim == 16 && rank + outliers > 0) continue;
          const RangeCase pages({dtype, bits, dim == 64 ? 3 : 1, dim, rank, outliers}, random);
          CHECK(pages.is_right());
        }
      }
    }
  }
}

TEST("features, in parts, of layers that share them, turned in pairs of both kinds") {
  std::mt19937 random(2);
  const FeaturePages::Shape shapes[] = {
      {DType::bf16, 4, 2, 64, 96, {32, false}, 1},   {DType::f32, 4, 3, 16, 32, {8, true}, 2},
      {DType::bf16, 2, 3, 64, 128, {32, true}, 1},   {DType::f32, 2, 5, 80, 288, {20, false}, 1},
      {DType::bf16, 4, 1, 256, 64, {128, false}, 1}, {DType::f32, 4, 2, 48, 96, {0, false}, 3},
  };
  for (const FeaturePages::Shape& shape : shapes) {
    CHECK(FeatureCase(shape, shape.layers - 1, random).is_right());
  }
}

TEST("numbers of vectors") {
  std::mt19937 random(3);
  const CodebookPages::Shape shapes[] = {
      {DType::bf16, 2, 64, {32, false}}, {DType::f32, 3, 16, {8, true}},
      {DType::bf16, 1, 80, {20, false}}, {DType::f32, 2, 48, {0, false}},
      {DType::bf16, 2, 256, {7, true}},
  };
  for (const CodebookPages::Shape& shape : shapes) CHECK(are_vectors_right(shape, random));
}

TEST("every barrier matters") {
  std::mt19937 random(4);
  const RangeCase ranges({DType::bf16, 4, 1, 64, 0, 200}, random);
  expect_every_barrier_matters([&] { return ranges.is_right(); });
  const FeatureCase features({DType::bf16, 4, 2, 16, 32, {4, false}, 1}, 0, random);
  expect_every_barrier_matters([&] { return features.is_right(); });
}

}  // namespace effinfer

CHECK_MAIN()
