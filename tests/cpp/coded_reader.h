// Numbers of coded pages (ops/coded_pages.h), one at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/float16.h"
#include "ops/kv_layout.h"

namespace effinfer {

struct CodedReader {
  const ops::CodedPages& coded;
  const uint8_t* keys;
  const uint8_t* values;

  CodedReader(const ops::CodedPages& pages, int32_t page, int64_t head)
      : coded(pages), keys(pages.head(page, head)), values(keys + pages.key_bytes()) {}

  struct Number {
    float value;  // start + code * step, exact, and what that lacks
    float step;
    int64_t range;  // numbers of one have the same
  };
  // Of keys a line is 16 tokens of a pair of dimensions, and a dimension has a range.
  Number key(int64_t token, int64_t dim) const {
    const uint8_t* rest = keys + coded.key_bytes() - coded.rest_bytes();
    return number(keys, coded.head_dim, dim / 2 * 4 + token / 16, token % 16 * 2 + dim % 2,
                  coded.head_dim, dim, 0, lacking(rest, coded.head_dim, 64, dim, token));
  }
  // Of values, 16 dimensions of a pair of tokens, and a token has a range a block.
  Number value(int64_t token, int64_t dim) const {
    const uint8_t* from = values;
    int32_t first = 0;
    for (; first + coded.block_dims(first) <= dim; first += coded.block_dims(first)) {
      from += coded.block_bytes(coded.block_dims(first));
    }
    const int32_t dims = coded.block_dims(first);
    return number(
        from, dims, token / 2 * (dims / 16) + (dim - first) / 16, dim % 16 * 2 + token % 2, 64,
        token, first * int64_t{64},
        lacking(values + coded.value_bytes() - coded.rest_bytes(), 64, coded.head_dim, token, dim));
  }

 private:
  // Number (i, c) of inner x columns.
  float lacking(const uint8_t* from, int64_t inner, int64_t columns, int64_t i, int64_t c) const {
    const auto at = [&](int64_t place) {
      uint16_t bits = 0;
      std::memcpy(&bits, from + place * 2, 2);
      return bits;
    };
    float sum = 0.0f;
    int64_t place = 0;
    for (int32_t k = 0; k < coded.rank; ++k, place += inner + columns) {
      sum += bf16_to_f32(at(place + i)) * bf16_to_f32(at(place + inner + c));
    }
    for (int32_t n = 0; n < coded.outliers; ++n) {
      if (at(place + n) == i * 256 + c) sum += bf16_to_f32(at(place + coded.outliers + n));
    }
    return sum;
  }
  Number number(const uint8_t* from, int32_t dims, int64_t line, int64_t word, int64_t ranges,
                int64_t range, int64_t first_range, float rest) const {
    const int64_t row_lines = 16 / coded.bits;
    uint16_t codes = 0;
    std::memcpy(&codes, from + line / row_lines * 64 + word * 2, 2);
    const int code = codes >> line % row_lines * coded.bits & ((1 << coded.bits) - 1);
    const uint8_t* starts = from + coded.code_bytes(dims);
    const auto at = [&](int64_t place) {
      uint16_t bits = 0;
      std::memcpy(&bits, starts + place * 2, 2);
      return f16_to_f32(bits);
    };
    const float step = at(ranges + range);
    return {at(range) + step * static_cast<float>(code) + rest, step, first_range + range};
  }
};

}  // namespace effinfer
