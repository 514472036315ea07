#include "cpu/elementwise.h"

#include "cpu/simd/elementwise_body.h"
#include "cpu/simd/lanes_portable.h"

namespace effinfer::cpu::portable {

using Body = ElementwiseBody<Lanes>;

const ElementwiseKernels kElementwise = {Body::rms_norm, Body::unary, Body::binary, Body::rope};

}  // namespace effinfer::cpu::portable
