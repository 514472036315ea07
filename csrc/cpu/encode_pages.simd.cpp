// Pages to 4 or 2 bits: of each range the least and the greatest number, then codes to the nearest.
// Where pages keep features (ops/page_features.h), these are made first, and are what is encoded.
#include "ops/encode_pages.h"

#include <algorithm>
#include <limits>
#include <span>

#include "core/float16.h"
#include "cpu/level.h"
#include "cpu/vectors/encode_rest.h"
#include "cpu/vectors/kv.h"
#include "cpu/vectors/page_turn.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

using V = KvBf16::V;

constexpr int64_t kLine = 64;  // bytes, and those of a row of codes

// The numbers of a range in the even, or the odd, words of its lines.
template <int kBits, int kLines>
struct Column {
  static constexpr float kMostCode = (1 << kBits) - 1;
  V x[kLines];
  V inverse;  // of the step
  V least;

  // Sets the range, as binary16 has it.
  void measure(uint16_t& least_bits, uint16_t& step_bits) {
    V low = x[0];
    V high = x[0];
    for (int i = 1; i < kLines; ++i) {
      low = min(low, x[i]);
      high = max(high, x[i]);
    }
    least_bits = f32_to_f16(within_f16(-maximum(V::set(0.0f) - low)));
    const float from = f16_to_f32(least_bits);
    const float wanted = (maximum(high) - from) / kMostCode;
    step_bits = f32_to_f16(within_f16(wanted < 0.0f ? 0.0f : wanted));
    const float step = f16_to_f32(step_bits);
    inverse = V::set(step > 0.0f ? 1.0f / step : 0.0f);
    least = V::set(from);
  }
  V code(int line) const { return code_of(x[line], least, inverse, kMostCode); }

 private:
  static float within_f16(float x) {
    constexpr float kLargest = 65504.0f;
    return x < -kLargest ? -kLargest : x > kLargest ? kLargest : x;
  }
};

// The 32 words of a row from the sums of their codes, which floats hold exactly.
void store_row(V even, V odd, uint8_t* row) {
  float words[2][16];
  even.store(words[0]);
  odd.store(words[1]);
  uint32_t dwords[16];
  for (int i = 0; i < 16; ++i) {
    dwords[i] = static_cast<uint32_t>(static_cast<int32_t>(words[0][i])) |
                static_cast<uint32_t>(static_cast<int32_t>(words[1][i])) << 16;
  }
  __builtin_memcpy(row, dwords, sizeof(dwords));
}

// Keys, or values, of one head of a page as lines: a pair of the inner dimension x 16 columns.
struct Lines {
  const uint8_t* data;
  bool wide;  // float32: the even words, and the odd ones
  int64_t pair;
  int64_t column;  // from 16 to the next
  int64_t odd;     // bytes

  void load(int64_t pair_at, int64_t column_at, V& even, V& odd_words) const {
    const uint8_t* line = data + pair_at * pair + column_at * column;
    if (wide) {
      even = V::load(reinterpret_cast<const float*>(line));
      odd_words = V::load(reinterpret_cast<const float*>(line + odd));
      return;
    }
    V words[2];
    KvBf16::expand(line, words);
    even = words[0];
    odd_words = words[1];
  }
};
Lines keys_of(const ops::KvLayer& kv, int64_t page, int64_t head) {
  const bool wide = kv.dtype == DType::f32;
  const int64_t pair = wide ? 2 * kLine : kLine;
  return {kv.k_head(page, head), wide, pair, kv.head_dim / 2 * pair, kLine};
}
Lines values_of(const ops::KvLayer& kv, int64_t page, int64_t head) {
  const bool wide = kv.dtype == DType::f32;
  const int64_t row = kv.head_dim / 16 * kLine;
  return {kv.v_head(page, head), wide, wide ? 2 * row : row, kLine, row};
}
// Of rows of floats.
Lines lines_of(const float* rows, int64_t columns) {
  const int64_t row = columns * int64_t{sizeof(float)};
  return {reinterpret_cast<const uint8_t*>(rows), true, 2 * row, kLine, row};
}
void store_rows(const Lines& lines, int64_t inner, int64_t columns, float* to) {
  for (int64_t pair = 0; pair < inner / 2; ++pair) {
    for (int64_t c = 0; c < columns; c += 16) {
      V even;
      V odd;
      lines.load(pair, c / 16, even, odd);
      even.store(to + 2 * pair * columns + c);
      odd.store(to + (2 * pair + 1) * columns + c);
    }
  }
}

// 16 kLines columns from `first` on to rows of codes, and ranges of the even words and of the odd
// ones of each pair.
template <int kBits, int kLines>
void encode_lines(const Lines& lines, int64_t num_pairs, int64_t first, uint8_t* codes,
                  uint16_t* starts, uint16_t* steps) {
  constexpr int kRowLines = 16 / kBits;
  for (int64_t pair = 0; pair < num_pairs; codes += kLine) {
    V even = V::set(0.0f);
    V odd = V::set(0.0f);
    float weight = 1.0f;  // of a line's codes in a word
    for (int at = 0; at < kRowLines; at += kLines, ++pair, starts += 2, steps += 2) {
      Column<kBits, kLines> evens;
      Column<kBits, kLines> odds;
      for (int i = 0; i < kLines; ++i) lines.load(pair, first / 16 + i, evens.x[i], odds.x[i]);
      evens.measure(starts[0], steps[0]);
      odds.measure(starts[1], steps[1]);
      for (int i = 0; i < kLines; ++i, weight *= 1 << kBits) {
        even = fma(evens.code(i), V::set(weight), even);
        odd = fma(odds.code(i), V::set(weight), odd);
      }
    }
    store_row(even, odd, codes);
  }
}

// A block of columns, with `inner` ranges; what codes lack of it stays in `rest`, if there is one.
template <int kBits>
void encode_block(const ops::CodedPages& coded, const Lines& lines, int64_t inner, int64_t first,
                  int32_t columns, int32_t dims, uint8_t* to, PageRest* rest) {
  auto* starts = reinterpret_cast<uint16_t*>(to + coded.code_bytes(dims));
  uint16_t* steps = starts + inner;
  const auto encode = columns == 64   ? encode_lines<kBits, 4>
                      : columns == 32 ? encode_lines<kBits, 2>
                                      : encode_lines<kBits, 1>;
  encode(lines, inner / 2, first, to, starts, steps);
  for (int64_t i = 0; rest != nullptr && i < inner; ++i) {
    rest->subtract_codes(i, first, first + columns, f16_to_f32(starts[i]), f16_to_f32(steps[i]),
                         (1 << kBits) - 1);
  }
}

template <int kBits>
void encode_keys(const ops::CodedPages& coded, const Lines& lines, uint8_t* to, PageRest* rest) {
  encode_block<kBits>(coded, lines, coded.head_dim, 0, ops::CodedPages::kTokens, coded.head_dim, to,
                      rest);
}
template <int kBits>
void encode_values(const ops::CodedPages& coded, const Lines& lines, uint8_t* to, PageRest* rest) {
  for (int32_t first = 0; first < coded.head_dim;) {
    const int32_t dims = coded.block_dims(first);
    encode_block<kBits>(coded, lines, ops::CodedPages::kTokens, first, dims, dims, to, rest);
    to += coded.block_bytes(dims);
    first += dims;
  }
}

// With what codes lack behind them.
template <class Encode>
[[gnu::noinline]] void encode_with_rest(const ops::CodedPages& coded, const Lines& lines,
                                        int64_t inner, int64_t columns, Encode&& encode,
                                        uint8_t* to, uint8_t* rest_to) {
  PageRest rest(coded, inner, columns);
  store_rows(lines, inner, columns, rest.row(0));
  rest.take_outliers();
  encode(coded, lines_of(rest.row(0), columns), to, &rest);
  rest.write(rest_to);
}

// Of a head, or of a part of the features.
template <int kBits>
void encode_numbers(const ops::CodedPages& coded, const Lines& keys, const Lines& values,
                    uint8_t* to) {
  uint8_t* values_to = to + coded.key_bytes();
  if (coded.rest_bytes() == 0) {
    encode_keys<kBits>(coded, keys, to, nullptr);
    encode_values<kBits>(coded, values, values_to, nullptr);
    return;
  }
  constexpr int64_t kTokens = ops::CodedPages::kTokens;
  const size_t rest = coded.rest_bytes();
  encode_with_rest(coded, keys, coded.head_dim, kTokens, encode_keys<kBits>, to, values_to - rest);
  encode_with_rest(coded, values, kTokens, coded.head_dim, encode_values<kBits>, values_to,
                   values_to + coded.value_bytes() - rest);
}

template <int kBits>
void encode_head(const ops::KvLayer& kv, const ops::PageCoding& page, int64_t head) {
  encode_numbers<kBits>(kv.coded, keys_of(kv, page.from, head), values_of(kv, page.from, head),
                        kv.coded.head(page.to, head));
}

// to[rows][columns] += a[rows][depth] b[depth][columns].
void add_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t rows,
                 int64_t depth, int64_t columns, float* to) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t c = 0; c < columns; c += 16) {
      V sums = V::load(to + row * columns + c);
      for (int64_t i = 0; i < depth; ++i) {
        sums = fma(V::set(a[row * a_stride + i]), V::load(b + i * b_stride + c), sums);
      }
      sums.store(to + row * columns + c);
    }
  }
}

constexpr int64_t kMostNumbers = int64_t{ops::PageFeatures::kMostPart} * ops::CodedPages::kTokens;

// Adds a layer's to a part of them, of all its heads: of keys [features][tokens], of values
// [tokens][features].
void add_features(const ops::KvLayer& kv, const ops::PageCoding& page, int64_t part, float* keys,
                  float* values) {
  const ops::PageFeatures& features = *kv.coded.features;
  constexpr int64_t kTokens = ops::CodedPages::kTokens;
  const int64_t dim = kv.head_dim;
  const int64_t count = kv.coded.head_dim;
  alignas(64) float of_head[kMostNumbers];
  for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
    store_rows(keys_of(kv, page.from, head), dim, kTokens, of_head);
    turn_keys<V, true>(features.turns, page.place, of_head);
    add_product(features.keys + part * count * features.dims() + head * dim, features.dims(),
                of_head, kTokens, count, dim, kTokens, keys);
    store_rows(values_of(kv, page.from, head), kTokens, dim, of_head);
    add_product(of_head, dim, features.value_dims + head * dim * features.count + part * count,
                features.count, kTokens, dim, count, values);
  }
}

// A part of what some layers share.
template <int kBits>
void encode_features(std::span<const ops::KvLayer> layers, const ops::PageCoding& page,
                     int64_t part) {
  const ops::CodedPages& coded = layers[0].coded;
  const int64_t count = coded.head_dim;
  alignas(64) float keys[kMostNumbers] = {};
  alignas(64) float values[kMostNumbers] = {};
  for (const ops::KvLayer& kv : layers) add_features(kv, page, part, keys, values);
  encode_numbers<kBits>(coded, lines_of(keys, ops::CodedPages::kTokens), lines_of(values, count),
                        coded.head(page.to, part));
  *coded.place(page.to, part) = page.place;
}

// The number of the nearest vector of a codebook, [4][256], for each token of 4 rows.
void encode_vectors(const float* dims, const float* squares, const float* const rows[4],
                    uint8_t* codes) {
  constexpr int kTokens = ops::CodedPages::kTokens;
  constexpr int kVectors = ops::PageCodebooks::kVectors;
  float nearest[kTokens];
  int32_t found[kTokens] = {};
  std::fill_n(nearest, kTokens, std::numeric_limits<float>::lowest());
  for (int32_t code = 0; code < kVectors; ++code) {
    const float* x = dims + code;
    const float square = squares[code];
    for (int t = 0; t < kTokens; ++t) {
      const float near = rows[0][t] * x[0] + rows[1][t] * x[kVectors] +
                         rows[2][t] * x[2 * kVectors] + rows[3][t] * x[3 * kVectors] - square;
      const bool is_nearest = near > nearest[t];
      nearest[t] = is_nearest ? near : nearest[t];
      found[t] = is_nearest ? code : found[t];
    }
  }
  for (int t = 0; t < kTokens; ++t) codes[t] = static_cast<uint8_t>(found[t]);
}

// Of a head.
void encode_head_vectors(const ops::KvLayer& kv, const ops::PageCoding& page, int64_t head) {
  constexpr int64_t kTokens = ops::CodedPages::kTokens;
  constexpr int64_t kDims = ops::PageCodebooks::kDims;
  constexpr int64_t kVectors = ops::PageCodebooks::kVectors;
  const ops::PageCodebooks& books = *kv.coded.codebooks;
  const int64_t dim = kv.head_dim;
  alignas(64) float keys[kMostNumbers];
  alignas(64) float rows[kMostNumbers];
  alignas(64) float values[kMostNumbers];
  store_rows(keys_of(kv, page.from, head), dim, kTokens, keys);
  turn_keys<V, true>(books.turns, page.place, keys);
  store_rows(values_of(kv, page.from, head), kTokens, dim, rows);
  for (int64_t d = 0; d < dim; ++d) {
    for (int64_t t = 0; t < kTokens; ++t) values[d * kTokens + t] = rows[t * dim + d];
  }
  uint8_t* to = kv.coded.head(page.to, head);
  for (int64_t group = 0; group < dim / kDims; ++group) {
    const int64_t book = books.book(head, group);
    const float* of_keys[kDims];
    const float* of_values[kDims];
    for (int64_t d = 0; d < kDims; ++d) {
      of_keys[d] = keys + books.order[group * kDims + d] * kTokens;
      of_values[d] = values + (group * kDims + d) * kTokens;
    }
    encode_vectors(books.keys + book * kDims * kVectors, books.key_squares + book * kVectors,
                   of_keys, to + group * kTokens);
    encode_vectors(books.value_dims + book * kDims * kVectors,
                   books.value_squares + book * kVectors, of_values,
                   to + kv.coded.key_bytes() + group * kTokens);
  }
  *kv.coded.place(page.to, head) = page.place;
}

// Of a page of some layers all that is coded together.
template <int kBits>
void encode_part(std::span<const ops::KvLayer> layers, const ops::PageCoding& page, int64_t part) {
  if (layers[0].coded.features != nullptr) return encode_features<kBits>(layers, page, part);
  if (layers[0].coded.codebooks != nullptr) return encode_head_vectors(layers[0], page, part);
  encode_head<kBits>(layers[0], page, part);
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
void run<Level::EFFINFER_LEVEL>(const ops::EncodePagesProblem& p, Team& team) {
  using namespace EFFINFER_LEVEL;
  const auto encode = p.layers[0].coded.bits == 4 ? encode_part<4> : encode_part<2>;
  const ops::CodedPages& coded = p.layers[0].coded;
  const int64_t parts = coded.num_kv_heads;
  const int64_t shared = coded.features == nullptr ? 1 : coded.features->shared_layers;
  const int64_t groups = (p.num_layers + shared - 1) / shared;
  team.for_chunks(groups * p.num_pages * parts, [&](int64_t task) {
    const int64_t page = task / parts;
    const int64_t first = page / p.num_pages * shared;
    const auto count = static_cast<size_t>(std::min(shared, p.num_layers - first));
    encode({p.layers + first, count}, p.pages[page % p.num_pages], task % parts);
  });
}

}  // namespace effinfer::cpu
