// Products of matrices that lie in a warp's registers: for host_unit.cpp.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "cuda/unit.h"

namespace effinfer::cuda::host {

// The matrices of a warp's m16n8 product by PTX's fragments: element e of register r of lane i, of
// A at row i / 4 + 8 (r % 2), of B at column i / 4.
template <class Sum, int kPerRegister>
struct Product {
  static constexpr int kDepth = 8 * kPerRegister;

  struct Slot {
    Sum* d;
    const uint32_t* a;
    const uint32_t* b;
  };

  template <Sum (*kNumber)(uint32_t)>
  static void multiply(void** all) {
    constexpr int kBits = 32 / kPerRegister;
    constexpr uint32_t kMask = static_cast<uint32_t>((uint64_t{1} << kBits) - 1);
    Sum a[16][kDepth];
    Sum b[kDepth][8];
    for (int i = 0; i < kWarp; ++i) {
      const Slot& slot = *static_cast<Slot*>(all[i]);
      for (int r = 0; r < 4; ++r) {
        for (int e = 0; e < kPerRegister; ++e) {
          const int k = i % 4 * kPerRegister + e;
          a[i / 4 + r % 2 * 8][k + r / 2 * (kDepth / 2)] = kNumber(slot.a[r] >> kBits * e & kMask);
          if (r < 2) b[k + r * (kDepth / 2)][i / 4] = kNumber(slot.b[r] >> kBits * e & kMask);
        }
      }
    }
    // Eight columns at once, each in the order of k.
    for (int row = 0; row < 16; ++row) {
      Sum sums[8];
      const auto sum_of = [&](int column) -> Sum& {
        return static_cast<Slot*>(all[row % 8 * 4 + column / 2])->d[row / 8 * 2 + column % 2];
      };
      for (int column = 0; column < 8; ++column) sums[column] = sum_of(column);
      for (int k = 0; k < kDepth; ++k) {
        for (int column = 0; column < 8; ++column) sums[column] += a[row][k] * b[k][column];
      }
      for (int column = 0; column < 8; ++column) sum_of(column) = sums[column];
    }
  }
};

inline float of_bf16(uint32_t bits) {
  return float_of(bits << 16);
}
inline float of_f16(uint32_t bits) {
  return f16_to_f32(static_cast<uint16_t>(bits));
}
inline int32_t of_s8(uint32_t bits) {
  return static_cast<int8_t>(bits);
}

}  // namespace effinfer::cuda::host
