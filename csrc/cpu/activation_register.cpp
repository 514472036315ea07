#include "cpu/register.h"

namespace effinfer::cpu {

void register_activation() {}

}  // namespace effinfer::cpu
