#include "cpu/register.h"

namespace effinfer::cpu {

void register_attention() {}

}  // namespace effinfer::cpu
