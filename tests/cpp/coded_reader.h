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
    float value;  // least + code * step, exact
    float least;
    float step;
    int64_t range;  // numbers of one have the same
  };
  // Of keys a line is 16 tokens of a pair of dimensions, and four of them have a range.
  Number key(int64_t token, int64_t dim) const {
    return number(keys, dim / 2 * 4 + token / 16, token % 16 * 2 + dim % 2,
                  ops::CodedPages::kKeyLines);
  }
  // Of values, 16 dimensions of a pair of tokens.
  Number value(int64_t token, int64_t dim) const {
    return number(values, token / 2 * (coded.head_dim / 16) + dim / 16, dim % 16 * 2 + token % 2,
                  coded.bits);
  }

 private:
  Number number(const uint8_t* from, int64_t line, int64_t word, int64_t range_lines) const {
    const int64_t row_lines = 16 / coded.bits;
    uint16_t codes = 0;
    std::memcpy(&codes, from + line / row_lines * 64 + word * 2, 2);
    const int code = codes >> line % row_lines * coded.bits & ((1 << coded.bits) - 1);
    ops::CodeRange range;
    std::memcpy(&range,
                from + coded.code_bytes() +
                    static_cast<size_t>(line / range_lines) * sizeof(ops::CodeRange),
                sizeof(range));
    const bool odd = word % 2 != 0;
    const float least = f16_to_f32(odd ? range.least_odd : range.least_even);
    const float step = f16_to_f32(odd ? range.step_odd : range.step_even);
    return {least + step * static_cast<float>(code), least, step,
            line / range_lines * 2 + word % 2};
  }
};

}  // namespace effinfer
