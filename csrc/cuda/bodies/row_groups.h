// Where the rows of a warp lie in a packed weight.
#pragma once

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// Group `index` of a weight. A unit's second group that is none repeats the last, and nobody takes
// its sums.
EFFINFER_DEVICE const uint8_t* row_group(const MatmulWeight& weight, int index) {
  const int last = weight.groups - 1;
  return weight.data + (index < last ? index : last) * weight.group_bytes;
}

}  // namespace effinfer::cuda
