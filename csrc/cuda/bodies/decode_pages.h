// Coded pages (ops/coded_pages.h) as pages of keys and values, rounded once: what attention reads
// of them. A block has 16 dims of the keys, or of the values, of a head of a page, a tile of 16
// dims x 64 tokens of what codes stand for, with all that these lack.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "cuda/unit.h"
#include "ops/coded_pages.h"
#include "ops/kv_layout.h"

namespace effinfer::cuda {

struct DecodePagesParams {
  ops::CodedPages coded;  // of ranges
  ops::DecodedPages decoded;
  DType dtype = DType::bf16;  // or f32
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;

  constexpr int64_t head_numbers() const { return int64_t{ops::kPageSize} * head_dim; }
};

// 16 dims of all tokens.
struct DecodedTile {
  static constexpr int kDims = 16;
  static constexpr int kTokens = ops::kPageSize;
  float numbers[kDims][kTokens + 1];  // so that neither rows nor columns share banks
};

// What the codes of a head's keys, or of its values, stand for.
class CodedNumbers {
 public:
  EFFINFER_DEVICE CodedNumbers(const ops::CodedPages& coded, const uint8_t* from, bool of_values)
      : coded_(coded), from_(from), of_values_(of_values) {}

  // Of dims from `first` on. All threads of the block.
  template <int kThreads, class Unit>
  EFFINFER_DEVICE void fill(Unit& unit, int first, DecodedTile& tile) const {
    const Codes codes = codes_of(first);
    for (int i = unit.thread; i < kPairs; i += kThreads) {
      const int dim = of_values_ ? i % 16 : i / kTokens * 2;
      const int token = of_values_ ? i / 16 * 2 : i % kTokens;
      fill_pair(unit, codes, first, dim, token, tile);
    }
    unit.sync();
    if (coded_.outliers == 0) return;
    add_outliers<kThreads>(unit, first, tile);
    unit.sync();
  }

 private:
  static constexpr int kTokens = DecodedTile::kTokens;
  static constexpr int kPairs = DecodedTile::kDims * kTokens / 2;  // of neighbours of one word
  static constexpr int kRowWords = static_cast<int>(ops::CodedPages::kRow) / 4;

  struct Codes {
    const uint32_t* rows;
    const uint16_t* starts;  // of dims, or of tokens; steps behind them
    int ranges;
    int lines;  // of a pair
    int line;   // the first of the dims'
  };

  EFFINFER_DEVICE Codes codes_of(int first) const {
    const uint8_t* block = from_;
    int32_t begin = 0;
    int32_t dims = coded_.head_dim;
    while (of_values_) {
      dims = coded_.block_dims(begin);
      if (begin + dims > first) break;
      block += coded_.block_bytes(dims);
      begin += dims;
    }
    const auto* starts = reinterpret_cast<const uint16_t*>(block + coded_.code_bytes(dims));
    const auto* rows = reinterpret_cast<const uint32_t*>(block);
    if (of_values_) return {rows, starts, kTokens, dims / 16, (first - begin) / 16};
    return {rows, starts, dims, ops::CodedPages::kKeyLines, first / 2 * ops::CodedPages::kKeyLines};
  }

  // Two dims of a token, or two tokens of a dim, whose codes are in one dword; `dim` of the tile.
  template <class Unit>
  EFFINFER_DEVICE void fill_pair(Unit& unit, const Codes& codes, int first, int dim, int token,
                                 DecodedTile& tile) const {
    const int pair = of_values_ ? token / 2 : dim / 2;
    const int line = codes.line + pair * codes.lines + (of_values_ ? 0 : token / 16);
    const int column = of_values_ ? dim : token % 16;
    const int a_row = 16 / coded_.bits;
    const uint32_t word = unit.load(codes.rows + line / a_row * kRowWords + column);
    const int shift = line % a_row * coded_.bits;
    const uint32_t mask = (1u << coded_.bits) - 1;
    EFFINFER_UNROLL
    for (int n = 0; n < 2; ++n) {
      const int d = of_values_ ? dim : dim + n;
      const int t = of_values_ ? token + n : token;
      const int range = of_values_ ? t : first + d;
      const float start = unit.from_f16(unit.load(codes.starts + range));
      const float step = unit.from_f16(unit.load(codes.starts + codes.ranges + range));
      const auto code = static_cast<float>(word >> (shift + 16 * n) & mask);
      tile.numbers[d][t] = start + code * step + factors(unit, first + d, t);
    }
  }

  // Behind keys, and behind values.
  EFFINFER_DEVICE const uint16_t* rest() const {
    const size_t bytes = of_values_ ? coded_.value_bytes() : coded_.key_bytes();
    return reinterpret_cast<const uint16_t*>(from_ + bytes - coded_.rest_bytes());
  }

  template <class Unit>
  EFFINFER_DEVICE float factors(Unit& unit, int dim, int token) const {
    float sum = 0.0f;
    const uint16_t* u = rest();
    const int inner = of_values_ ? kTokens : coded_.head_dim;
    for (int k = 0; k < coded_.rank; ++k, u += kTokens + coded_.head_dim) {
      const float of_inner = bf16_to_f32(unit.load(u + (of_values_ ? token : dim)));
      const float of_column = bf16_to_f32(unit.load(u + inner + (of_values_ ? dim : token)));
      sum += of_inner * of_column;
    }
    return sum;
  }

  // Places differ, but for those of zeros, which say nothing.
  template <int kThreads, class Unit>
  EFFINFER_DEVICE void add_outliers(Unit& unit, int first, DecodedTile& tile) const {
    const uint16_t* places = rest() + coded_.rank * (kTokens + coded_.head_dim);
    for (int n = unit.thread; n < coded_.outliers; n += kThreads) {
      const uint16_t place = unit.load(places + n);
      const float lacks = bf16_to_f32(unit.load(places + coded_.outliers + n));
      const int token = of_values_ ? place >> 8 : place & 255;
      const int dim = (of_values_ ? place & 255 : place >> 8) - first;
      if (lacks == 0.0f || dim < 0 || dim >= DecodedTile::kDims || token >= kTokens) continue;
      tile.numbers[dim][token] += lacks;
    }
  }

  const ops::CodedPages& coded_;
  const uint8_t* const from_;
  const bool of_values_;
};

struct DecodePages {
  static constexpr const char* kName = "decode_pages";
  static constexpr int kThreads = 128;
  using Params = DecodePagesParams;
  using Shared = DecodedTile;

  static int64_t blocks(const Params& p) {
    return int64_t{p.decoded.count} * p.num_kv_heads * 2 * (p.head_dim / DecodedTile::kDims);
  }

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& tile) {
    const int slices = p.head_dim / DecodedTile::kDims;
    const int first = unit.block % slices * DecodedTile::kDims;
    const int part = unit.block / slices;
    const bool of_values = part % 2 != 0;
    const int head = part / 2 % p.num_kv_heads;
    const int place = part / 2 / p.num_kv_heads;
    const int32_t number = unit.load(p.decoded.numbers + place);
    if (number < 0) return;
    const Page page = {p, of_values, p.head_numbers() * (int64_t{place} * p.num_kv_heads + head)};
    const int32_t id = p.coded.first_page + number;
    const uint8_t* from = of_values ? p.coded.values_of(id, head) : p.coded.keys_of(id, head);
    CodedNumbers(p.coded, from, of_values).template fill<kThreads>(unit, first, tile);
    constexpr int kPairs = DecodedTile::kDims * DecodedTile::kTokens / 2;
    for (int i = unit.thread; i < kPairs; i += kThreads) {
      const int dim = of_values ? i % 16 : i / DecodedTile::kTokens * 2;
      const int token = of_values ? i / 16 * 2 : i % DecodedTile::kTokens;
      const float low = tile.numbers[dim][token];
      const float high = of_values ? tile.numbers[dim][token + 1] : tile.numbers[dim + 1][token];
      page.put_pair(unit, first + dim, token, low, high);
    }
  }

 private:
  // A head's, where attention reads them.
  struct Page {
    const Params& p;
    bool of_values;
    int64_t begin;  // numbers

    EFFINFER_DEVICE int64_t at(int dim, int token, int share) const {
      return begin + (of_values ? ops::v_offset(token, dim, p.head_dim, share)
                                : ops::k_offset(token, dim, p.head_dim, share));
    }
    // Two dims of a token, of values two tokens of a dim: neighbours in pages of bf16.
    template <class Unit>
    EFFINFER_DEVICE void put_pair(Unit& unit, int dim, int token, float low, float high) const {
      uint8_t* const to = of_values ? p.decoded.v : p.decoded.k;
      if (p.dtype == DType::f32) {
        auto* const numbers = reinterpret_cast<float*>(to);
        numbers[at(dim, token, 1)] = low;
        numbers[at(dim + (of_values ? 0 : 1), token + (of_values ? 1 : 0), 1)] = high;
      } else {
        reinterpret_cast<uint32_t*>(to)[at(dim, token, 2) / 2] = unit.bf16x2(low, high);
      }
    }
  };
};

}  // namespace effinfer::cuda
