// Codes of a page into lines of bfloat16 (ops/coded_pages.h), word by word.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/float16.h"
#include "ops/coded_pages.h"

namespace effinfer::cpu::portable {
namespace {

// What codes of a range stand for.
class CodeTable {
 public:
  explicit CodeTable(const ops::CodeRange& range) {
    const float least[2] = {f16_to_f32(range.least_even), f16_to_f32(range.least_odd)};
    const float step[2] = {f16_to_f32(range.step_even), f16_to_f32(range.step_odd)};
    for (int code = 0; code < 16; ++code) {
      for (int odd = 0; odd < 2; ++odd) {
        values_[code][odd] = f32_to_bf16(least[odd] + step[odd] * static_cast<float>(code));
      }
    }
  }

  // Line kLine of a row.
  template <int kBits, int kLine>
  void decode(const uint8_t* row, uint8_t* line) const {
    uint16_t words[32];
    std::memcpy(words, row, sizeof(words));
    for (int i = 0; i < 32; ++i) {
      words[i] = values_[words[i] >> kLine * kBits & ((1 << kBits) - 1)][i % 2];
    }
    std::memcpy(line, words, sizeof(words));
  }

 private:
  uint16_t values_[16][2];
};

}  // namespace
}  // namespace effinfer::cpu::portable
