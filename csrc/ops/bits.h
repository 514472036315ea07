// Bits of packed masks: bit i is bit i % 8 of byte i / 8.
#pragma once

#include <algorithm>
#include <cstdint>

namespace effinfer::ops {

inline void set_bits(uint8_t* bits, int64_t begin, int64_t end) {
  for (; begin < end && begin % 8 != 0; ++begin) {
    bits[begin / 8] |= static_cast<uint8_t>(1 << begin % 8);
  }
  if (begin >= end) return;
  std::fill(bits + begin / 8, bits + end / 8, uint8_t{0xff});
  for (begin = end / 8 * 8; begin < end; ++begin) {
    bits[begin / 8] |= static_cast<uint8_t>(1 << begin % 8);
  }
}

}  // namespace effinfer::ops
