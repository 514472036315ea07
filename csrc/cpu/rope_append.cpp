#include "cpu/rope_append.h"

#include "cpu/vectors/math_portable.h"
#include "cpu/vectors/rope_append_body.h"

namespace effinfer::cpu {

void portable::rope_append(const RopeAppendRow& row) {
  RopeAppendBody<F32x16, Isa::portable>::run(row);
}

}  // namespace effinfer::cpu
