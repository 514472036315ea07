// Coded pages (ops/coded_pages.h) as pages of keys and values, rounded once: what attention reads
// of them. A block has 16 dims of the keys, or of the values, of a head of a page, a tile of 16
// dims x 64 tokens of what codes stand for, with all that these lack.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "cuda/unit.h"
#include "ops/attention.h"
#include "ops/kv_layout.h"

namespace effinfer::cuda {

struct DecodePagesParams {
  ops::CodedPages coded;
  ops::DecodedPages decoded;
  DType dtype = DType::bf16;  // or f32
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  // Of a coded head: of its keys, and of its values with what is behind them; what codes lack, at
  // the ends of keys and of values, begins there.
  int32_t key_bytes = 0;
  int32_t value_bytes = 0;
  int32_t key_rest = 0;
  int32_t value_rest = 0;

  static DecodePagesParams of(const ops::AttentionProblem& p) {
    const ops::CodedPages& coded = p.coded;
    const size_t rest = coded.rest_bytes();
    return {coded,
            p.decoded,
            p.k.dtype,
            p.num_kv_heads,
            p.k.dims,
            static_cast<int32_t>(coded.key_bytes()),
            static_cast<int32_t>(coded.behind_keys()),
            static_cast<int32_t>(coded.key_bytes() - rest),
            static_cast<int32_t>(coded.value_bytes() - rest)};
  }
  constexpr int64_t head_numbers() const { return int64_t{ops::kPageSize} * head_dim; }
  // Of keys, or of values with what is behind them.
  constexpr const uint8_t* codes(int32_t number, int32_t head, bool of_values) const {
    const int32_t bytes = of_values ? value_bytes : key_bytes;
    return (of_values ? coded.memory.v : coded.memory.k) +
           coded.memory.offset(number, int64_t{coded.num_kv_heads} * bytes) + int64_t{head} * bytes;
  }
};

// 16 dims of all tokens.
struct DecodedTile {
  static constexpr int kDims = 16;
  static constexpr int kTokens = ops::kPageSize;
  float numbers[kDims][kTokens + 1];  // so that neither rows nor columns share banks
};

// What the codes of a head's keys, or of its values, stand for: numbers (inner, column), of keys
// dims and tokens, of values tokens and dims. Those of an even inner number and the next one are in
// one dword, as are their ranges and factors.
class CodedNumbers {
 public:
  EFFINFER_DEVICE CodedNumbers(const DecodePagesParams& p, const uint8_t* from, bool of_values)
      : coded_(p.coded),
        from_(from),
        rest_(reinterpret_cast<const uint32_t*>(from + (of_values ? p.value_rest : p.key_rest))),
        of_values_(of_values) {}

  // Of dims from `first` on. All threads of the block.
  template <int kThreads, class Unit>
  EFFINFER_DEVICE void fill(Unit& unit, int first, DecodedTile& tile) const {
    const Codes codes = codes_of(first);
    EFFINFER_NO_UNROLL
    for (int i = unit.thread; i < kPairs; i += kThreads) {
      const int columns = of_values_ ? kDims : kTokens;
      const int pair = i / columns;
      const int column = i % columns;
      const Pair numbers = decode(unit, codes, pair, of_values_ ? 0 : first, column);
      float* to = of_values_ ? &tile.numbers[column][2 * pair] : &tile.numbers[2 * pair][column];
      to[0] = numbers.low;
      to[of_values_ ? 1 : kTokens + 1] = numbers.high;
    }
    unit.sync();
    if (coded_.outliers == 0) return;
    add_outliers<kThreads>(unit, first, tile);
    unit.sync();
  }

 private:
  static constexpr int kTokens = DecodedTile::kTokens;
  static constexpr int kDims = DecodedTile::kDims;
  static constexpr int kPairs = kDims * kTokens / 2;
  static constexpr int kRowWords = static_cast<int>(ops::CodedPages::kRow) / 4;

  struct Codes {
    const uint32_t* rows;
    const uint32_t* starts;  // two each
    const uint32_t* steps;
    int lines;   // of a pair
    int line;    // of the first pair and column
    int column;  // the first one, among all
  };
  struct Pair {
    float low;
    float high;
  };

  EFFINFER_DEVICE Codes codes_of(int first) const {
    const uint8_t* block = from_;
    int32_t begin = 0;
    int32_t dims = coded_.head_dim;
    EFFINFER_NO_UNROLL
    while (of_values_) {
      dims = coded_.block_dims(begin);
      if (begin + dims > first) break;
      block += coded_.block_bytes(dims);
      begin += dims;
    }
    const auto* rows = reinterpret_cast<const uint32_t*>(block);
    const auto* starts = reinterpret_cast<const uint32_t*>(block + coded_.code_bytes(dims));
    if (of_values_)
      return {rows, starts, starts + kTokens / 2, dims / 16, (first - begin) / 16, first};
    constexpr int kLines = ops::CodedPages::kKeyLines;
    return {rows, starts, starts + dims / 2, kLines, first / 2 * kLines, 0};
  }

  // Of inner numbers `inner` + 2 `pair` and the next.
  template <class Unit>
  EFFINFER_DEVICE Pair decode(Unit& unit, const Codes& codes, int pair, int inner,
                              int column) const {
    const int line = codes.line + pair * codes.lines + column / 16;
    const int row_bits = coded_.bits == 4 ? 2 : 3;  // of the number of a row's lines
    const uint32_t word = unit.load(codes.rows + (line >> row_bits) * kRowWords + column % 16) >>
                          (line & ((1 << row_bits) - 1)) * coded_.bits;
    const uint32_t mask = (1u << coded_.bits) - 1;
    const int range = inner / 2 + pair;
    const uint32_t starts = unit.load(codes.starts + range);
    const uint32_t steps = unit.load(codes.steps + range);
    const auto half = [&](uint32_t bits) { return unit.from_f16(static_cast<uint16_t>(bits)); };
    Pair sum = {half(starts) + static_cast<float>(word & mask) * half(steps),
                half(starts >> 16) + static_cast<float>(word >> 16 & mask) * half(steps >> 16)};
    // u of the pair, and w of the column.
    const uint32_t* factor = rest_;
    const int inners = of_values_ ? kTokens : coded_.head_dim;
    EFFINFER_NO_UNROLL
    for (int k = 0; k < coded_.rank; ++k, factor += (kTokens + coded_.head_dim) / 2) {
      const uint32_t u = unit.load(factor + range);
      const auto* columns = reinterpret_cast<const uint16_t*>(factor) + inners + codes.column;
      const float w = bf16_to_f32(unit.load(columns + column));
      sum.low += float_of(u << 16) * w;
      sum.high += float_of(u & 0xffff0000u) * w;
    }
    return sum;
  }

  // Places differ, but for those of zeros, which say nothing.
  template <int kThreads, class Unit>
  EFFINFER_DEVICE void add_outliers(Unit& unit, int first, DecodedTile& tile) const {
    const auto* places =
        reinterpret_cast<const uint16_t*>(rest_) + coded_.rank * (kTokens + coded_.head_dim);
    EFFINFER_NO_UNROLL
    for (int n = unit.thread; n < coded_.outliers; n += kThreads) {
      const uint16_t place = unit.load(places + n);
      const float lacks = bf16_to_f32(unit.load(places + coded_.outliers + n));
      const int token = of_values_ ? place >> 8 : place & 255;
      const int dim = (of_values_ ? place & 255 : place >> 8) - first;
      if (lacks == 0.0f || dim < 0 || dim >= kDims || token >= kTokens) continue;
      tile.numbers[dim][token] += lacks;
    }
  }

  const ops::CodedPages& coded_;
  const uint8_t* const from_;
  const uint32_t* const rest_;
  const bool of_values_;
};

// A block's part of the pages, and where attention reads them.
struct DecodedSlice {
  int first;  // dim
  bool of_values;
  int head;
  int32_t number;  // of the coded page; -1: none
  int64_t begin;   // numbers before the head's

  static int64_t blocks(const DecodePagesParams& p) {
    return int64_t{p.decoded.count} * p.num_kv_heads * 2 * (p.head_dim / DecodedTile::kDims);
  }

  template <class Unit>
  EFFINFER_DEVICE DecodedSlice(Unit& unit, const DecodePagesParams& p) {
    const int slices = p.head_dim / DecodedTile::kDims;
    first = unit.block % slices * DecodedTile::kDims;
    const int part = unit.block / slices;
    of_values = part % 2 != 0;
    head = part / 2 % p.num_kv_heads;
    begin = part / 2 * p.head_numbers();
    number = unit.load(p.decoded.numbers + part / 2 / p.num_kv_heads);
  }

  // Of a head, or of a part of features.
  EFFINFER_DEVICE const uint8_t* codes(const DecodePagesParams& p, int coded_head) const {
    return p.codes(number, coded_head, of_values);
  }

  EFFINFER_DEVICE int64_t at(const DecodePagesParams& p, int dim, int token, int share) const {
    return begin + (of_values ? ops::v_offset(token, dim, p.head_dim, share)
                              : ops::k_offset(token, dim, p.head_dim, share));
  }
  EFFINFER_DEVICE uint8_t* to(const DecodePagesParams& p) const {
    return of_values ? p.decoded.v : p.decoded.k;
  }
  template <class Unit>
  EFFINFER_DEVICE void put(Unit& unit, const DecodePagesParams& p, int dim, int token,
                           float x) const {
    if (p.dtype == DType::f32) {
      reinterpret_cast<float*>(to(p))[at(p, dim, token, 1)] = x;
    } else {
      reinterpret_cast<uint16_t*>(to(p))[at(p, dim, token, 2)] =
          static_cast<uint16_t>(unit.bf16x2(x, 0.0f));
    }
  }
  // Two dims of a token, of values two tokens of a dim: a dword of pages of bf16.
  template <class Unit>
  EFFINFER_DEVICE void put_pair(Unit& unit, const DecodePagesParams& p, int dim, int token,
                                float low, float high) const {
    if (p.dtype == DType::f32) {
      put(unit, p, dim, token, low);
      put(unit, p, dim + (of_values ? 0 : 1), token + (of_values ? 1 : 0), high);
    } else {
      reinterpret_cast<uint32_t*>(to(p))[at(p, dim, token, 2) / 2] = unit.bf16x2(low, high);
    }
  }
};

struct DecodePages {
  static constexpr const char* kName = "decode_pages";
  static constexpr int kThreads = 128;
  using Params = DecodePagesParams;
  using Shared = DecodedTile;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& tile) {
    const DecodedSlice slice(unit, p);
    if (slice.number < 0) return;
    const CodedNumbers numbers(p, slice.codes(p, slice.head), slice.of_values);
    numbers.template fill<kThreads>(unit, slice.first, tile);
    constexpr int kPairs = DecodedTile::kDims * DecodedTile::kTokens / 2;
    EFFINFER_NO_UNROLL
    for (int i = unit.thread; i < kPairs; i += kThreads) {
      const int dim = slice.of_values ? i % 16 : i / DecodedTile::kTokens * 2;
      const int token = slice.of_values ? i / 16 * 2 : i % DecodedTile::kTokens;
      const float high =
          slice.of_values ? tile.numbers[dim][token + 1] : tile.numbers[dim + 1][token];
      slice.put_pair(unit, p, slice.first + dim, token, tile.numbers[dim][token], high);
    }
  }
};

}  // namespace effinfer::cuda
