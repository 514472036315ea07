#include "cpu/row_math.h"

#include "cpu/simd/row_math_body.h"
#include "cpu/simd/select_portable.h"

namespace effinfer::cpu::portable {

const kernels::RowMath kRowMath = RowMathBody<F32x16>::table();

}  // namespace effinfer::cpu::portable
