#include "cpu/rope_append.h"
#include "cpu/simd/math_avx2.h"
#include "cpu/simd/rope_append_body.h"

namespace effinfer::cpu {

void avx2::rope_append(const RopeAppendRow& row) {
  RopeAppendBody<F32x16, Isa::avx2>::run(row);
}

}  // namespace effinfer::cpu
