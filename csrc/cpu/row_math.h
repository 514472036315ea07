// The row passes of each ISA level: one body (cpu/simd/row_math_body.h) over its vector of 16
// floats and its way to pick lanes (cpu/simd/select_*.h).
#pragma once

#include "kernels/row_math.h"

namespace effinfer::cpu {

namespace portable {
extern const kernels::RowMath kRowMath;
}
namespace avx2 {
extern const kernels::RowMath kRowMath;
}
namespace avx512 {
extern const kernels::RowMath kRowMath;
}

}  // namespace effinfer::cpu
