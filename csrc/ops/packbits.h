// Booleans as bits, a segment after the other.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/ops/packbits.h"
#include "ops/cost.h"

namespace effinfer::ops {

// Bit i % 8 of byte out_indptr[s] + i / 8, counted from `order`'s end, says whether element
// indptr[s] + i of x is not zero; bits beyond a segment are zero.
struct PackBitsProblem {
  const uint8_t* x = nullptr;
  const void* indptr = nullptr;  // [num_segments + 1] in indptr_dtype: i32 or i64
  DType indptr_dtype = DType::i32;
  const int64_t* out_indptr = nullptr;  // [num_segments + 1] bytes
  int64_t num_segments = 0;
  int64_t bytes = 0;  // out_indptr[num_segments]
  BitOrder order = BitOrder::big;
  uint8_t* out = nullptr;
};

std::string describe(const PackBitsProblem& problem);
Cost cost(const PackBitsProblem& problem);

}  // namespace effinfer::ops
