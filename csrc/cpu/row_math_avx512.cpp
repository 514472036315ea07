#include "cpu/row_math.h"
#include "cpu/simd/row_math_body.h"
#include "cpu/simd/select_avx512.h"

namespace effinfer::cpu::avx512 {

const kernels::RowMath kRowMath = RowMathBody<F32x16>::table();

}  // namespace effinfer::cpu::avx512
