#include "effinfer/version.h"

#include <string>

#include "core/backend.h"

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
  static const std::string found = [] {
    const Backend* backend = cuda_backend();
    return backend == nullptr ? std::string(EFFINFER_CUDA_STATUS) : backend->status();
  }();
  return found.c_str();
}

}  // namespace effinfer
