// The row passes of each ISA level: one body (cpu/vectors/row_math_body.h) over its vector of 16
// floats and its way to pick lanes (cpu/vectors/select_*.h).
#pragma once

#include "cpu/row_math_table.h"

namespace effinfer::cpu {

namespace portable {
extern const ops::RowMath kRowMath;
}
namespace avx2 {
extern const ops::RowMath kRowMath;
}
namespace avx512 {
extern const ops::RowMath kRowMath;
}

}  // namespace effinfer::cpu
