// Booleans as bits (ops/packbits.h): a thread a byte of them.
#pragma once

#include <cstdint>

#include "cuda/bodies/row_chunks.h"
#include "cuda/unit.h"
#include "ops/packbits.h"

namespace effinfer::cuda {

struct PackBitsKernel {
  static constexpr const char* kName = "packbits";
  static constexpr int kThreads = 256;
  using Params = ops::PackBitsProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t byte = int64_t{unit.block} * kThreads + unit.thread;
    if (byte >= p.bytes) return;
    // The last segment that starts at or before it; those that end there are empty.
    int64_t low = 0;
    int64_t high = p.num_segments;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (unit.load(p.out_indptr + middle) <= byte) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int64_t first = start(unit, p, low) + (byte - unit.load(p.out_indptr + low)) * 8;
    const int64_t left = start(unit, p, low + 1) - first;
    const uint8_t* x = p.x + first;
    uint32_t bits = 0;
    if (left >= 8 && reinterpret_cast<uintptr_t>(x) % 8 == 0) {
      const Pair eight = *reinterpret_cast<const Pair*>(x);
      EFFINFER_UNROLL
      for (int i = 0; i < 8; ++i) bits |= bit(p, i, eight.words[i / 4] >> 8 * (i % 4) & 0xff);
    } else {
      EFFINFER_UNROLL
      for (int i = 0; i < 8; ++i) bits |= bit(p, i, i < left ? unit.load(x + i) : 0u);
    }
    p.out[byte] = static_cast<uint8_t>(bits);
  }

 private:
  EFFINFER_DEVICE static uint32_t bit(const Params& p, int i, uint32_t element) {
    return element == 0 ? 0 : 1u << (p.order == ops::BitOrder::big ? 7 - i : i);
  }
  template <class Unit>
  EFFINFER_DEVICE static int64_t start(Unit& unit, const Params& p, int64_t segment) {
    if (p.indptr_dtype == DType::i64) {
      return unit.load(static_cast<const int64_t*>(p.indptr) + segment);
    }
    return unit.load(static_cast<const int32_t*>(p.indptr) + segment);
  }
};

}  // namespace effinfer::cuda
