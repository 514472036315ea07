// Packing and unpacking of the ternary formats of ops/packed_weight.h.
#pragma once

#include <cstdint>

#include "effinfer/tensor.h"
#include "ops/packed_weight.h"

namespace effinfer::cpu {

// The `rows` rows from `first_row` of a ternary tensor as a group. Returns whether all codes are
// digits; if not, the group is of no use.
bool pack_ternary_group(const TensorView& weight, int64_t first_row, int64_t rows,
                        const ops::PackedFormat& format, uint8_t* out);

// Rows [first, last) of a group as floats, [last - first][cols].
void unpack_ternary_rows(const ops::PackedWeight& weight, int64_t group, int64_t first,
                         int64_t last, float* out);

}  // namespace effinfer::cpu
