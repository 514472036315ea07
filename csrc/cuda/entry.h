// launch<Kernel>(params, blocks, queue): on the GPU, or in the emulator where the host's compiler
// compiles the kernels. num_multiprocessors(queue): of its device.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "cuda/unit.h"

#if !defined(__CUDACC__)

#include "gpu/host_unit.h"

namespace effinfer::cuda {

template <class Kernel>
void launch(const typename Kernel::Params& params, int64_t blocks, Queue& queue) {
  host::enqueue<Kernel>(params, blocks, queue);
}

// As an H100 has.
inline int num_multiprocessors(const Queue&) {
  return 132;
}

}  // namespace effinfer::cuda

#else

#include "cuda/device_unit.cuh"
#include "cuda/stream.h"

namespace effinfer::cuda {

inline int num_multiprocessors(const Queue& queue) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, queue.device().index),
        "cudaDeviceGetAttribute");
  return count;
}

// With 1 a thread may have all the registers that there are; without a number the compiler spills
// some where that lets more blocks in.
template <class Kernel>
constexpr int least_blocks() {
  if constexpr (requires { Kernel::kLeastBlocks; }) {
    return Kernel::kLeastBlocks;
  } else {
    return 0;
  }
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, least_blocks<Kernel>())
    entry(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ __align__(128) unsigned char memory[];
  DeviceUnit unit;
  Kernel::run(unit, params, *reinterpret_cast<typename Kernel::Shared*>(memory));
}

template <class Kernel>
void launch(const typename Kernel::Params& params, int64_t blocks, Queue& queue) {
  static_assert(sizeof(params) <= 4096 && Kernel::kThreads % kWarp == 0);
  if (blocks == 0) return;
  constexpr size_t kShared = sizeof(typename Kernel::Shared);
  const cudaStream_t stream = stream_of(queue);
  if constexpr (kShared > kPlainSharedBytes) {
    check(cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
          Kernel::kName);
  }
  entry<Kernel><<<static_cast<unsigned>(blocks), Kernel::kThreads, kShared, stream>>>(params);
  check(cudaGetLastError(), Kernel::kName);
}

}  // namespace effinfer::cuda

#endif
