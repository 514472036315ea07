#include "effinfer/version.h"

namespace effinfer {

const char* version() {
  return EFFINFER_VERSION;
}

const char* cpu_status() {
#if defined(__x86_64__) && !EFFINFER_X86
  return "ready, portable kernels only: built with EFFINFER_VECTOR_KERNELS=OFF";
#elif EFFINFER_X86 && !EFFINFER_AMX
  return "ready, without AMX kernels: the compiler of this build has no AMX";
#else
  return "ready";
#endif
}

const char* cuda_status() {
  return EFFINFER_CUDA_STATUS;
}

}  // namespace effinfer
