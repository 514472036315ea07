#include "cpu/row_math.h"

#include "cpu/vectors/row_math_body.h"
#include "cpu/vectors/select_portable.h"

namespace effinfer::cpu::portable {

const ops::RowMath kRowMath = RowMathBody<F32x16>::table();

}  // namespace effinfer::cpu::portable
