// launch<Kernel>(params, blocks, queue): on the GPU, or in the emulator where the host's compiler
// compiles the kernels; with `shared` bytes for a block where its Shared is but the first of them,
// and with `threads` of it where kThreads are the most.
// num_multiprocessors(queue), arch_of(queue): of its device; shared_bytes_of(queue): which a block
// may have there.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "cuda/unit.h"

#if !defined(__CUDACC__)

#include "gpu/host_unit.h"

namespace effinfer::cuda {

template <class Kernel>
void launch(const typename Kernel::Params& params, int64_t blocks, Queue& queue,
            size_t shared = sizeof(typename Kernel::Shared), int threads = Kernel::kThreads) {
  host::enqueue<Kernel>(params, blocks, queue, shared, threads);
}

inline int num_multiprocessors(const Queue&) {
  return host::multiprocessors();
}
inline int arch_of(const Queue&) {
  return host::arch();
}
inline int64_t shared_bytes_of(const Queue&) {
  return host::shared_bytes();
}

}  // namespace effinfer::cuda

#else

#include <stdexcept>
#include <string>

#include "cuda/device_unit.cuh"
#include "cuda/stream.h"

namespace effinfer::cuda {

inline int num_multiprocessors(const Queue& queue) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, queue.device().index),
        "cudaDeviceGetAttribute");
  return count;
}

// Whose kernels the device runs: those for 9.0a where the build has them, else those for 8.0.
inline int arch_of(const Queue& queue) {
  constexpr bool kHopper = EFFINFER_CUDA_HOPPER;
  int major = 0;
  int minor = 0;
  const int index = queue.device().index;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index),
        "cudaDeviceGetAttribute");
  return kHopper && major == 9 && minor == 0 ? 90 : 80;
}

inline int64_t shared_bytes_of(const Queue& queue) {
  int bytes = 0;
  check(
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, queue.device().index),
      "cudaDeviceGetAttribute");
  return bytes;
}

// Whether a kernel waits for the kernel before where it first reads what that may have written.
template <class Kernel>
constexpr bool waits_itself() {
  if constexpr (requires { Kernel::kWaitsItself; }) {
    return Kernel::kWaitsItself;
  } else {
    return false;
  }
}

// How many blocks of a kernel an SM is to hold at once, where it says so: what its registers are to
// leave room for, and no reason to spill some for more.
template <class Kernel>
constexpr int min_blocks() {
  if constexpr (requires { Kernel::kMinBlocks; }) {
    return Kernel::kMinBlocks;
  } else {
    return 0;
  }
}

// Whether the kernel is launched on the GPU that is compiled for; else it is empty there.
// Instructions of 9.0a exist nowhere else, so that 9.0 without the letter is as 8.0.
template <class Kernel>
constexpr bool compiles_here() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return runs_on<Kernel>(90);
#elif defined(__CUDA_ARCH__)
  return runs_on<Kernel>(80);
#else
  return true;
#endif
}

// The block's threads and shared bytes are part of the name: profilers show them, and
// tools/check_sass.py takes from them how many blocks an SM holds.
template <class Kernel, int kThreads, size_t kShared>
__global__ void __launch_bounds__(kThreads, min_blocks<Kernel>())
    entry(const __grid_constant__ typename Kernel::Params params) {
  if constexpr (compiles_here<Kernel>()) {
    extern __shared__ __align__(1024) unsigned char memory[];
    DeviceUnit unit;
    unit.start();
    if constexpr (!waits_itself<Kernel>()) unit.wait_for_inputs();
    Kernel::run(unit, params, *reinterpret_cast<typename Kernel::Shared*>(memory));
  }
}

template <class Kernel>
void launch(const typename Kernel::Params& params, int64_t blocks, Queue& queue,
            size_t shared = sizeof(typename Kernel::Shared), int threads = Kernel::kThreads) {
  static_assert(sizeof(params) <= 4096 && Kernel::kThreads % kWarp == 0);
  if (blocks == 0) return;
  if constexpr (!(runs_on<Kernel>(80) && runs_on<Kernel>(90))) {
    // Elsewhere it was compiled to nothing, and would leave its results as they were.
    if (!runs_on<Kernel>(arch_of(queue))) {
      throw std::logic_error("[" + std::string(Kernel::kName) + "] expected another GPU");
    }
  }
  constexpr size_t kShared = sizeof(typename Kernel::Shared);
  const CurrentDevice current(queue.device());
  constexpr auto kEntry = entry<Kernel, Kernel::kThreads, kShared>;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream_of(queue);
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = starts_early(queue) ? 1 : 0;
  if (shared > kPlainSharedBytes) {
    // All there is: another thread's launch of the kernel may take more than this one.
    check(cudaFuncSetAttribute(kEntry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes_of(queue))),
          Kernel::kName);
  }
  check(cudaLaunchKernelEx(&config, kEntry, params), Kernel::kName);
}

}  // namespace effinfer::cuda

#endif

namespace effinfer::cuda {

// As Unit::has_bulk_copies() of the kernels that run there.
inline bool has_bulk_copies(const Queue& queue) {
  return arch_of(queue) == 90;
}

}  // namespace effinfer::cuda
