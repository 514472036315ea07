// Tests of what only Hopper has.
#pragma once

#include "gpu/host_unit.h"

namespace effinfer {

// While it lives the emulated device is one.
class OnHopper {
 public:
  OnHopper() { cuda::host::set_arch(90); }
  ~OnHopper() { cuda::host::set_arch(80); }
  OnHopper(const OnHopper&) = delete;
  OnHopper& operator=(const OnHopper&) = delete;
};

}  // namespace effinfer
