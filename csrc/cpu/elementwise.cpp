#include "cpu/elementwise.h"

#include "cpu/simd/elementwise_body.h"
#include "cpu/simd/math_portable.h"

namespace effinfer::cpu::portable {

using Body = ElementwiseBody<F32x16, Isa::portable>;

const ElementwiseKernels kElementwise = {Body::rms_norm, Body::unary, Body::binary, Body::rope};

}  // namespace effinfer::cpu::portable
