#include "cpu/rope_append.h"
#include "cpu/vectors/math_avx2.h"
#include "cpu/vectors/rope_append_body.h"

namespace effinfer::cpu {

void avx2::rope_append(const RopeAppendRow& row) {
  RopeAppendBody<F32x16, Isa::avx2>::run(row);
}

}  // namespace effinfer::cpu
