// In place of gpu/hopper_device.h where the kernels run on a GPU.
#pragma once

#include "core/backend.h"
#include "cpp/check.h"
#include "gpu/device_arrays.h"

namespace effinfer {

// Skips the test where the GPU is another one, which has the multiprocessors that it has.
class OnHopper {
 public:
  explicit OnHopper(int = 0) {
    if (!is_possible()) check::skip("needs compute capability 9.0");
  }
  static bool is_possible() { return current_target(kGpu).arch == 90; }
};

}  // namespace effinfer
