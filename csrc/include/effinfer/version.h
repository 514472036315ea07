#pragma once

#include "effinfer/export.h"

namespace effinfer {

// As in "1.2.3".
EFFINFER_API const char* version();

// "ready", and which kernels this build lacks because its compiler does not know the instructions.
EFFINFER_API const char* cpu_status();

// The state of the CUDA backend in this build: "off (built with EFFINFER_CUDA=OFF)", ...
EFFINFER_API const char* cuda_status();

}  // namespace effinfer
