// Tests of kernels whose shared memory depends on the GPU.
#pragma once

#include <cstdint>

#include "gpu/host_unit.h"

namespace effinfer {

// While it lives a block of the emulated GPU may have so much shared memory.
class SharedBytes {
 public:
  explicit SharedBytes(int64_t bytes) { cuda::host::set_shared_bytes(bytes); }
  ~SharedBytes() { cuda::host::set_shared_bytes(before_); }
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;

 private:
  const int64_t before_ = cuda::host::shared_bytes();
};

}  // namespace effinfer
