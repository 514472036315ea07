#include "cpu/elementwise.h"
#include "cpu/simd/elementwise_body.h"
#include "cpu/simd/math_avx512.h"

namespace effinfer::cpu::avx512 {

using Body = ElementwiseBody<F32x16, Isa::avx512>;

const ElementwiseKernels kElementwise = {Body::rms_norm, Body::unary, Body::binary, Body::rope};

}  // namespace effinfer::cpu::avx512
