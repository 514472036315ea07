// CUDA's streams and statuses, for code that nvcc compiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/backend.h"

namespace effinfer::cuda {

// Shared memory that a block may have without being asked for.
inline constexpr size_t kPlainSharedBytes = 48 << 10;

// Throws DeviceError or OutOfMemory, with `what` was done.
void check(cudaError_t status, const char* what);

// Of a queue that the CUDA backend made.
cudaStream_t stream_of(const Queue& queue);
// Whether its device can start a kernel's blocks before the kernel before has ended, and runs
// kernels that wait for it: PTX of 8.0 cannot.
bool starts_early(const Queue& queue);

// Makes a device the thread's own for as long as it lives: who embeds effinfer has one too.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace effinfer::cuda
