// The rows of an operand that a panel is multiplied by.
#pragma once

#include <cstdint>

namespace effinfer::cpu {

struct TokenRows {
  uint8_t* data;
  int64_t stride;  // bytes
  int64_t cols;    // padded

  [[gnu::always_inline]] TokenRows from(int64_t row) const {
    return {data + row * stride, stride, cols};
  }
};

}  // namespace effinfer::cpu
