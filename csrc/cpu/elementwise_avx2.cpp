#include "cpu/elementwise.h"
#include "cpu/simd/elementwise_body.h"
#include "cpu/simd/math_avx2.h"
#include "cpu/simd/norm_body.h"
#include "cpu/simd/rope_body.h"

namespace effinfer::cpu::avx2 {

using Body = ElementwiseBody<F32x16>;
using Norm = NormBody<F32x16, Isa::avx2>;
using Rope = RopeBody<F32x16>;

const ElementwiseKernels kElementwise = {Norm::rms_norm, Norm::layer_norm, Body::gated,
                                         Body::unary,    Body::binary,     Rope::rope};

}  // namespace effinfer::cpu::avx2
