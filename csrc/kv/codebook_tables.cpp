#include "kv/codebook_tables.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/float16.h"
#include "effinfer/error.h"

namespace effinfer::kv {
namespace {

constexpr size_t kDims = ops::PageCodebooks::kDims;
constexpr size_t kVectors = ops::PageCodebooks::kVectors;

// Dimensions of keys so that those of a pair are neighbours.
std::vector<int32_t> order_of(const ops::KeyTurns& turns, int32_t head_dim) {
  std::vector<int32_t> order;
  for (int32_t pair = 0; pair < turns.num_pairs; ++pair) {
    order.push_back(turns.first(pair));
    order.push_back(turns.second(pair));
  }
  for (int32_t d = 2 * turns.num_pairs; d < head_dim; ++d) order.push_back(d);
  return order;
}

}  // namespace

void check_codebooks(const KvCacheConfig& config) {
  const KvCoding& coding = config.coding;
  if (!coding.codebooks) return;
  const auto expect = [](bool is, const std::string& field, const std::string& expected,
                         int64_t got) {
    if (is) return;
    throw InvalidArgument("[kv_cache] coding." + field + ": expected " + expected + ", got " +
                          std::to_string(got));
  };
  expect(coding.bits == 2, "bits", "2 with codebooks", coding.bits);
  expect(coding.rank == 0, "rank", "0 with codebooks", coding.rank);
  expect(coding.outliers == 0, "outliers", "0 with codebooks", coding.outliers);
  expect(coding.features == 0, "features", "0 with codebooks", coding.features);
  const auto numbers = static_cast<int64_t>(coding.codebooks->size());
  const int64_t expected =
      int64_t{config.num_layers} * 2 * config.num_kv_heads * config.head_dim * int64_t{kVectors};
  expect(numbers == expected, "codebooks",
         std::to_string(expected) + " numbers, 256 for each dimension of keys and values of " +
             std::to_string(config.num_layers) + " encoded layers",
         numbers);
  const auto is_finite = [](uint16_t x) { return std::isfinite(bf16_to_f32(x)); };
  if (!std::all_of(coding.codebooks->begin(), coding.codebooks->end(), is_finite)) {
    throw InvalidArgument("[kv_cache] coding.codebooks: expected finite numbers");
  }
  require_rotations(config, "codebooks");
}

CodebookTables::CodebookTables(const KvCacheConfig& config, int32_t num_places)
    : turns_(config, num_places) {
  const size_t numbers =
      static_cast<size_t>(config.num_kv_heads) * static_cast<size_t>(config.head_dim) * kVectors;
  for (size_t number = 0; number < static_cast<size_t>(config.num_layers); ++number) {
    ops::PageCodebooks layer;
    layer.num_kv_heads = config.num_kv_heads;
    layer.head_dim = config.head_dim;
    layer.turns = turns_.layer(number);
    layer.order = orders_.emplace_back(order_of(layer.turns, config.head_dim)).data();
    const uint16_t* from = config.coding.codebooks->data() + 2 * number * numbers;
    const Books& keys = add_books(from, layer);
    const Books& values = add_books(from + numbers, layer);
    layer.keys = keys.dims.data();
    layer.key_squares = keys.squares.data();
    layer.values = values.vectors.data();
    layer.value_dims = values.dims.data();
    layer.value_squares = values.squares.data();
    layers_.push_back(layer);
  }
}

// Of vectors [codebooks][256][4].
const CodebookTables::Books& CodebookTables::add_books(const uint16_t* from,
                                                       const ops::PageCodebooks& layer) {
  const auto count = static_cast<size_t>(layer.books());
  Books& made = books_.emplace_back();
  made.vectors.resize(count * kDims * kVectors);
  made.dims.resize(made.vectors.size());
  made.squares.resize(count * kVectors);
  for (size_t book = 0; book < count; ++book) {
    for (size_t code = 0; code < kVectors; ++code) {
      for (size_t d = 0; d < kDims; ++d) {
        const size_t at = (book * kVectors + code) * kDims + d;
        const float x = made.vectors[at] = bf16_to_f32(from[at]);
        made.dims[(book * kDims + d) * kVectors + code] = x;
        made.squares[book * kVectors + code] += 0.5f * x * x;
      }
    }
  }
  return made;
}

}  // namespace effinfer::kv
