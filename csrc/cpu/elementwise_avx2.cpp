#include "cpu/elementwise.h"
#include "cpu/simd/elementwise_body.h"
#include "cpu/simd/math_avx2.h"

namespace effinfer::cpu::avx2 {

using Body = ElementwiseBody<F32x16, Isa::avx2>;

const ElementwiseKernels kElementwise = {Body::rms_norm, Body::unary, Body::binary, Body::rope};

}  // namespace effinfer::cpu::avx2
