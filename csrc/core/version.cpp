#include "effinfer/version.h"

namespace effinfer {

const char* version() {
  return EFFINFER_VERSION;
}

const char* cuda_status() {
  return EFFINFER_CUDA_STATUS;
}

}  // namespace effinfer
