// Tests of what only Hopper has.
#pragma once

#include "gpu/host_unit.h"

namespace effinfer {

// While it lives the emulated device is one, with so many multiprocessors.
class OnHopper {
 public:
  explicit OnHopper(int multiprocessors = 132) {
    cuda::host::set_arch(90);
    cuda::host::set_multiprocessors(multiprocessors);
  }
  ~OnHopper() {
    cuda::host::set_arch(80);
    cuda::host::set_multiprocessors(132);
  }
  // Whether there is one to be had.
  static bool is_possible() { return true; }
  OnHopper(const OnHopper&) = delete;
  OnHopper& operator=(const OnHopper&) = delete;
};

}  // namespace effinfer
