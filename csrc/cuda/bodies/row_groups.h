// Where the rows of a warp lie in a packed weight.
#pragma once

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// Where a row group lies, of the lane's rows 4 quad .. 4 quad + 3.
struct GroupPlace {
  const uint8_t* header;       // of super formats: the f16 of these rows in the first 256 k
  const uint8_t* superblocks;  // of all rows
};

// Group `index` of a weight. A unit's second group that is none repeats the last, and nobody takes
// its sums.
EFFINFER_DEVICE const uint8_t* row_group(const MatmulWeight& weight, int index) {
  const int last = weight.groups - 1;
  return weight.data + (index < last ? index : last) * weight.group_bytes;
}

// The lane's rows in group `index` of a weight.
EFFINFER_DEVICE GroupPlace group_place(const MatmulWeight& weight, int index, int64_t header_bytes,
                                       int lane) {
  const uint8_t* group = row_group(weight, index);
  return {group + lane / 4 % 4 * 8, group + header_bytes};
}

}  // namespace effinfer::cuda
