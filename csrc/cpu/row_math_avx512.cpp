#include "cpu/row_math.h"
#include "cpu/vectors/row_math_body.h"
#include "cpu/vectors/select_avx512.h"

namespace effinfer::cpu::avx512 {

const ops::RowMath kRowMath = RowMathBody<F32x16>::table();

}  // namespace effinfer::cpu::avx512
