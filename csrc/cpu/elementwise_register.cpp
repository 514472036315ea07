#include "cpu/register.h"

namespace effinfer::cpu {

void register_elementwise() {}

}  // namespace effinfer::cpu
