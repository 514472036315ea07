// Rows of int8_token operands (ops/operand.h), which ternary weights multiply: a block a row, with
// the bits that the CPU writes.
#pragma once

#include "cuda/bodies/int8_scale.h"
#include "cuda/bodies/row_chunks.h"
#include "cuda/unit.h"
#include "ops/operand.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

struct TokenRowsParams {
  const float* x = nullptr;
  int64_t x_stride = 0;
  uint8_t* out = nullptr;
  int64_t row_bytes = 0;
  int cols = 0;
  int padded = 0;
  bool vectored = false;
};

// First the row's largest magnitude, then its numbers once more: a row that was just read is in the
// first cache. A warp writes the 256 numbers under one sum at a time, a lane eight of them.
struct TokenRowsKernel {
  static constexpr const char* kName = "to_operand_int8_token";
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kNumbers = 8;
  using Params = TokenRowsParams;
  struct Shared {
    uint32_t largest[kWarps];
    int32_t totals[kWarps];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const float* x = p.x + unit.block * p.x_stride;
    uint8_t* record = p.out + unit.block * p.row_bytes;
    const Int8Scale scale(largest_magnitude(unit, x, p, shared));
    auto* sums = reinterpret_cast<int32_t*>(record + p.padded + 8);
    int32_t total = 0;
    for (int first = unit.warp * kSums; first < p.padded; first += kWarps * kSums) {
      const int32_t sum = write(unit, x, p, first + unit.lane * kNumbers, scale, record);
      if (unit.lane == 0) sums[first / kSums] = sum;
      total += sum;
    }
    if (unit.lane == 0) shared.totals[unit.warp] = total;
    unit.sync();
    if (unit.thread != 0) return;
    total = 0;
    for (const int32_t of_warp : shared.totals) total += of_warp;
    *reinterpret_cast<float*>(record + p.padded) = scale.scale;
    *reinterpret_cast<int32_t*>(record + p.padded + 4) = total;
  }

 private:
  static constexpr int kSums = static_cast<int>(ops::kTernaryBlock);

  template <class Unit>
  EFFINFER_DEVICE static uint32_t largest_magnitude(Unit& unit, const float* x, const Params& p,
                                                    Shared& shared) {
    uint32_t largest = 0;
    for (int first = unit.thread * kNumbers; first < p.cols; first += kThreads * kNumbers) {
      float values[kNumbers];
      load_floats(unit, x, first, p.cols, p.vectored, values);
      EFFINFER_UNROLL
      for (int i = 0; i < kNumbers; ++i) {
        const uint32_t bits = magnitude_bits(values[i]);
        if (first + i < p.cols && bits > largest) largest = bits;
      }
    }
    EFFINFER_UNROLL
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      const uint32_t other = unit.shfl_xor(largest, mask);
      largest = other > largest ? other : largest;
    }
    if (unit.lane == 0) shared.largest[unit.warp] = largest;
    unit.sync();
    for (const uint32_t of_warp : shared.largest) largest = of_warp > largest ? of_warp : largest;
    return largest;
  }

  // Eight numbers of a lane; returns the sum of the warp's.
  template <class Unit>
  EFFINFER_DEVICE static int32_t write(Unit& unit, const float* x, const Params& p, int first,
                                       const Int8Scale& scale, uint8_t* record) {
    int32_t sum = 0;
    if (first < p.padded) {
      float values[kNumbers];
      load_floats(unit, x, first, p.cols, p.vectored, values);
      Pair packed = {};
      EFFINFER_UNROLL
      for (int i = 0; i < kNumbers; ++i) {
        const int32_t q = first + i < p.cols ? scale.round(values[i]) : 0;
        packed.words[i / 4] |= static_cast<uint32_t>(q & 255) << 8 * (i % 4);
        sum += q;
      }
      *reinterpret_cast<Pair*>(record + first) = packed;
    }
    EFFINFER_UNROLL
    for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += unit.shfl_xor(sum, mask);
    return sum;
  }
};

}  // namespace effinfer::cuda
