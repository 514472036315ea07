#include "cpu/elementwise.h"
#include "cpu/vectors/elementwise_body.h"
#include "cpu/vectors/math_avx512.h"
#include "cpu/vectors/norm_body.h"
#include "cpu/vectors/rope_body.h"

namespace effinfer::cpu::avx512 {

using Body = ElementwiseBody<F32x16>;
using Norm = NormBody<F32x16, Isa::avx512>;
using Rope = RopeBody<F32x16>;

const ElementwiseKernels kElementwise = {Norm::rms_norm, Norm::layer_norm, Body::gated,
                                         Body::unary,    Body::binary,     Rope::rope};

}  // namespace effinfer::cpu::avx512
