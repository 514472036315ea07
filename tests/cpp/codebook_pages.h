// Coded pages of numbers of vectors (ops/page_codebooks.h), and what these stand for.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "expanded_model.h"
#include "kv/codebook_tables.h"

namespace effinfer::coded {

class CodebookPages {
 public:
  struct Shape {
    DType dtype;
    int32_t heads;
    int32_t dim;
    Turn turn;
  };

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
    for (int64_t i = 0; i < 2 * shape.heads * shape.dim * PageCodebooks::kVectors; ++i) {
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
  int64_t groups() const { return shape.dim / PageCodebooks::kDims; }
  // Of keys (0) and values (1): a dimension of a vector of a head's codebook.
  double number(int which, int64_t head, int64_t group, int64_t code, int64_t d) const {
    const int64_t book = (which * shape.heads + head) * groups() + group;
    return numbers_[index((book * PageCodebooks::kVectors + code) * PageCodebooks::kDims + d)];
  }
  int64_t code(int which, int32_t page, int64_t head, int64_t group, int64_t token) const {
    const CodedPages& coded = pages.layer.coded;
    const uint8_t* keys = coded.head(kPages + page, head);
    return (which == 0 ? keys : keys + coded.key_bytes())[group * kPageSize + token];
  }
  // Of a head's dimensions that of a vector.
  int64_t dim_of(int which, int64_t group, int64_t d) const {
    return which == 0 ? order_[index(group * PageCodebooks::kDims + d)]
                      : group * PageCodebooks::kDims + d;
  }
  static size_t index(int64_t i) { return static_cast<size_t>(i); }

 private:
  std::vector<float> numbers_;
  std::vector<int32_t> order_;
  std::unique_ptr<kv::CodebookTables> tables_;
};

inline Expanded expand(const CodebookPages& all) {
  const CodebookPages::Shape& shape = all.shape;
  Expanded made;
  for (int32_t page = 0; page < CodebookPages::kPages; ++page) {
    for (int64_t t = 0; t < kPageSize; ++t) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        std::vector<Expanded::Number> rows[2];
        for (int which = 0; which < 2; ++which) {
          rows[which].resize(CodebookPages::index(shape.dim));
          for (int64_t group = 0; group < all.groups(); ++group) {
            const int64_t code = all.code(which, page, head, group, t);
            for (int64_t d = 0; d < PageCodebooks::kDims; ++d) {
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

}  // namespace effinfer::coded
