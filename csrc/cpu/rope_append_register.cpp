#include "cpu/register.h"

namespace effinfer::cpu {

void register_rope_append() {}

}  // namespace effinfer::cpu
