// Coded pages of numbers of vectors: whether these are the nearest ones, and attention over them,
// beside attention in double precision over what they stand for.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "core/backend.h"
#include "expanded_model.h"
#include "kv/codebook_tables.h"

using namespace effinfer;
using namespace effinfer::coded;

namespace {

constexpr int64_t kDims = PageCodebooks::kDims;
constexpr int64_t kVectors = PageCodebooks::kVectors;

struct Shape {
  DType dtype;
  int32_t heads;
  int32_t dim;
  Turn turn;
};

class CodebookPages {
 public:
  static constexpr int32_t kPages = 5;
  const Shape shape;
  BothKinds pages;

  CodebookPages(const Shape& given, std::mt19937& random)
      : shape(given), pages(given.dtype, 2, kPages, given.heads, given.dim, random) {
    KvCacheConfig config;
    config.num_layers = 1;
    config.num_kv_heads = shape.heads;
    config.head_dim = shape.dim;
    config.coding.bits = 2;
    config.rope = {shape.turn.rope()};
    auto bits = std::make_shared<std::vector<uint16_t>>();
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < 2 * shape.heads * shape.dim * kVectors; ++i) {
      bits->push_back(f32_to_bf16(2.0f * normal(random)));
      numbers_.push_back(bf16_to_f32(bits->back()));
    }
    config.coding.codebooks = bits;
    kv::check_codebooks(config);
    tables_ = std::make_unique<kv::CodebookTables>(config, 100);
    CodedPages& coded = pages.layer.coded;
    coded.codebooks = &tables_->layer(0);
    pages.coded.resize(coded.head_bytes() * index(kPages * shape.heads));
    coded.data = pages.coded.data();
    for (int32_t i = 0; i < shape.turn.pairs; ++i) {
      order_.push_back(shape.turn.first(i));
      order_.push_back(shape.turn.second(i));
    }
    for (int32_t d = 2 * shape.turn.pairs; d < shape.dim; ++d) order_.push_back(d);
  }

  void encode(const Variant<EncodePagesProblem>& variant, ThreadPool& pool) {
    std::vector<PageCoding> all;
    for (int32_t i = 0; i < kPages; ++i) all.push_back({i, kPages + i, place(i)});
    const EncodePagesProblem problem = {&pages.layer, 1, all.data(), kPages};
    CHECK(variant.rejects(problem) == nullptr);
    pool.parallel([&](Team& team) { variant.run(problem, team); });
  }

  static int32_t place(int32_t page) { return page * 17 % 90; }
  static int64_t position(int32_t page, int64_t token) { return place(page) * kPageSize + token; }
  int64_t groups() const { return shape.dim / kDims; }
  // Of keys (0) and values (1): a dimension of a vector of a head's codebook.
  double number(int which, int64_t head, int64_t group, int64_t code, int64_t d) const {
    const int64_t book = (which * shape.heads + head) * groups() + group;
    return numbers_[index((book * kVectors + code) * kDims + d)];
  }
  int64_t code(int which, int32_t page, int64_t head, int64_t group, int64_t token) const {
    const CodedPages& coded = pages.layer.coded;
    const uint8_t* keys = coded.head(kPages + page, head);
    return (which == 0 ? keys : keys + coded.key_bytes())[group * kPageSize + token];
  }
  // Of a head's dimensions that of a vector.
  int64_t dim_of(int which, int64_t group, int64_t d) const {
    return which == 0 ? order_[index(group * kDims + d)] : group * kDims + d;
  }
  static size_t index(int64_t i) { return static_cast<size_t>(i); }

 private:
  std::vector<float> numbers_;
  std::vector<int32_t> order_;
  std::unique_ptr<kv::CodebookTables> tables_;
};

// No vector is nearer than the one that was chosen, but for what float32 rounds.
void check_codes(const CodebookPages& all, const Variant<EncodePagesProblem>& variant) {
  const Shape& shape = all.shape;
  double worst = 0;
  const auto check = [&](int which, int32_t page, int64_t head, int64_t t, const double* row) {
    for (int64_t group = 0; group < all.groups(); ++group) {
      double nearest = 1e300, chosen = 0, magnitude = 1e-6;
      for (int64_t code = 0; code < kVectors; ++code) {
        double distance = 0, size = 0;
        for (int64_t d = 0; d < kDims; ++d) {
          const double x = row[all.dim_of(which, group, d)];
          const double c = all.number(which, head, group, code, d);
          distance += (x - c) * (x - c);
          size += 4 * std::abs(x * c) + c * c;
        }
        magnitude = std::max(magnitude, size);
        nearest = std::min(nearest, distance);
        if (code == all.code(which, page, head, group, t)) chosen = distance;
      }
      worst = std::max(worst, (chosen - nearest) / (32 * kFloat * magnitude));
    }
  };
  for (int32_t page = 0; page < CodebookPages::kPages; ++page) {
    for (int64_t head = 0; head < shape.heads; ++head) {
      for (int64_t t = 0; t < kPageSize; ++t) {
        std::vector<double> key, value;
        for (int64_t d = 0; d < shape.dim; ++d) {
          key.push_back(all.pages.key(page, head, t, d));
          value.push_back(all.pages.value(page, head, t, d));
        }
        shape.turn.apply(CodebookPages::position(page, t), -1.0, key.data());
        check(0, page, head, t, key.data());
        check(1, page, head, t, value.data());
      }
    }
  }
  if (worst > 1.0) check::fail(variant.name.c_str(), worst, "another vector is nearer");
}

Expanded expand(const CodebookPages& all) {
  const Shape& shape = all.shape;
  Expanded made;
  for (int32_t page = 0; page < CodebookPages::kPages; ++page) {
    for (int64_t t = 0; t < kPageSize; ++t) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        std::vector<Expanded::Number> rows[2];
        for (int which = 0; which < 2; ++which) {
          rows[which].resize(CodebookPages::index(shape.dim));
          for (int64_t group = 0; group < all.groups(); ++group) {
            const int64_t code = all.code(which, page, head, group, t);
            for (int64_t d = 0; d < kDims; ++d) {
              const double x = all.number(which, head, group, code, d);
              rows[which][CodebookPages::index(all.dim_of(which, group, d))] = {x, 0.0};
            }
          }
        }
        turn_key(shape.turn, CodebookPages::position(page, t), shape.dtype == DType::bf16,
                 shape.dim, rows[0].data());
        made.keys.insert(made.keys.end(), rows[0].begin(), rows[0].end());
        made.values.insert(made.values.end(), rows[1].begin(), rows[1].end());
      }
    }
  }
  return made;
}

const Shape kShapes[] = {
    {DType::bf16, 2, 64, {32, false}}, {DType::f32, 3, 16, {8, true}},
    {DType::bf16, 1, 80, {20, false}}, {DType::f32, 2, 48, {0, false}},
    {DType::bf16, 2, 256, {7, true}},
};

}  // namespace

TEST("no vector is nearer than the chosen one") {
  std::mt19937 random(1);
  ThreadPool pool(2);
  for (const Shape& shape : kShapes) {
    CodebookPages all(shape, random);
    for (const auto& variant : table<EncodePagesProblem>().variants()) {
      if (variant.isa > current_isa()) continue;
      std::fill(all.pages.coded.begin(), all.pages.coded.end(), uint8_t{0xa5});
      all.encode(variant, pool);
      check_codes(all, variant);
    }
  }
}

// Of each sequence the first and the last row.
TEST("attention over numbers of vectors is that of what these stand for") {
  std::mt19937 random(2);
  ThreadPool pool(2);
  for (const Shape& shape : kShapes) {
    CodebookPages all(shape, random);
    all.encode(table<EncodePagesProblem>().variants().front(), pool);
    const Expanded coded = expand(all);
    const Batch batch = random_batch(CodebookPages::kPages, random);
    int compared = 0;
    for (const Arithmetic arithmetic : {Arithmetic::f32, Arithmetic::bf16}) {
      Call call(all.pages, batch, 2 * shape.heads, arithmetic, random);
      for (const auto& variant : table<AttentionProblem>().variants()) {
        if (refusal(variant, call.problem, current_target()) != nullptr) continue;
        const std::vector<float> got = call.run(variant, pool);
        for (size_t s = 0; s < batch.kv_len.size(); ++s) {
          for (const int32_t row : {batch.qo_indptr[s], batch.qo_indptr[s + 1] - 1}) {
            const float* first = got.data() + row * call.problem.out_stride;
            const double worst = worst_of_row(all.pages, coded, batch, call, s, row, first);
            if (worst > 1.0) check::fail(variant.name.c_str(), worst, "a row is too far away");
          }
        }
        ++compared;
      }
    }
    CHECK(compared > 0);
  }
}

TEST("a page of numbers of vectors takes 2 bits a number, and a row of 64 bytes") {
  const PageCodebooks books;
  CodedPages pages = {2, 0, 1, 128, nullptr};
  pages.codebooks = &books;
  CHECK_EQ(pages.head_bytes(), size_t{2 * 128 * 64 / 4 + 64});
}

CHECK_MAIN()
