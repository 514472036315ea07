// Packed ternary weights (ops/packed_weight.h) as A fragments of mma.m16n8k32, as they lie.
//
// As in dequant.h lane (g, t) reads the 16 bytes of four rows in the lines of its t. A dword of
// digits and one of activations hold the same four k, which is what a register of an A and of a B
// fragment of mma.m16n8k32 is:
//
//   line i = 4 u + t, field f     dword f L + i of a block of 64, L its lines
#pragma once

#include "cuda/unit.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

// The digits of a dword of a line.
template <ops::QuantBits kBits>
struct TernaryDigits {
  static constexpr int kFields = kBits == ops::QuantBits::t2 ? 4 : 5;
  // A digit of field f comes 4^(f % kSets) times.
  static constexpr int kSets = kBits == ops::QuantBits::t2 ? 2 : 1;

  EFFINFER_DEVICE static void take(uint32_t word, uint32_t (&out)[kFields]) {
    if constexpr (kBits == ops::QuantBits::t2) {
      EFFINFER_UNROLL
      for (int f = 0; f < 4; ++f)
        out[f] = word >> f / 2 * 4 & (f % 2 == 0 ? 0x03030303u : 0x0c0c0c0cu);
    } else {
      // The upper byte of three times a byte is its digit, the lower one the next byte: two bytes
      // at a time, with room for their products.
      uint32_t even = word & 0x00ff00ffu;
      uint32_t odd = word >> 8 & 0x00ff00ffu;
      EFFINFER_UNROLL
      for (int f = 0; f < 5; ++f) {
        even *= 3;
        odd *= 3;
        out[f] = (even >> 8 & 0x00030003u) | (odd & 0x03000300u);
        even &= 0x00ff00ffu;
        odd &= 0x00ff00ffu;
      }
    }
  }
};

}  // namespace effinfer::cuda
