#include "cpu/elementwise.h"
#include "cpu/vectors/elementwise_body.h"
#include "cpu/vectors/math_avx2.h"
#include "cpu/vectors/norm_body.h"
#include "cpu/vectors/rope_body.h"

namespace effinfer::cpu::avx2 {

using Body = ElementwiseBody<F32x16>;
using Norm = NormBody<F32x16, Isa::avx2>;
using Rope = RopeBody<F32x16>;

const ElementwiseKernels kElementwise = {Norm::rms_norm, Norm::layer_norm, Body::gated,
                                         Body::unary,    Body::binary,     Rope::rope};

}  // namespace effinfer::cpu::avx2
