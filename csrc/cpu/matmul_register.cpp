#include "cpu/register.h"

namespace effinfer::cpu {

void register_matmul() {}

}  // namespace effinfer::cpu
