#include "cpu/rope_append.h"
#include "cpu/vectors/math_avx512.h"
#include "cpu/vectors/rope_append_body.h"

namespace effinfer::cpu {

void avx512::rope_append(const RopeAppendRow& row) {
  RopeAppendBody<F32x16, Isa::avx512>::run(row);
}

}  // namespace effinfer::cpu
