// The CUDA runtime as a backend.
#include "core/backend.h"

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/register.h"
#include "cuda/stream.h"
#include "effinfer/error.h"

namespace effinfer::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  const std::string message = "[cuda] " + std::string(what) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation) throw OutOfMemory(message);
  throw DeviceError(message);
}

CurrentDevice::CurrentDevice(Device device) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  check(cudaSetDevice(device.index), "cudaSetDevice");
}

CurrentDevice::~CurrentDevice() {
  cudaSetDevice(before_);
}

namespace {

// cudaMemset and copies inside the device return before they are done, those from the host's
// pageable memory maybe before the last bytes have arrived, and the streams of queues do not wait
// for the default one.
void finish(const char* what) {
  check(cudaStreamSynchronize(cudaStreamLegacy), what);
}

class DeviceMemory final : public Memory {
 public:
  explicit DeviceMemory(int index) : index_(index) {}
  Device device() const override { return {DeviceKind::cuda, index_}; }

  size_t capacity() const override {
    const CurrentDevice current(device());
    size_t free = 0;
    size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
  }

  // Memory that is written lazily elsewhere is zeros here, too.
  std::shared_ptr<void> allocate(size_t bytes, Pages pages) const override {
    const CurrentDevice current(device());
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, bytes == 0 ? 1 : bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    check(status, "cudaMalloc");
    std::shared_ptr<void> handle(memory, [](void* pointer) { cudaFree(pointer); });
    if (pages != Pages::heap) {
      check(cudaMemset(memory, 0, bytes), "cudaMemset");
      finish("cudaMemset");
    }
    return handle;
  }
  void zero(void* to, size_t bytes) const override {
    const CurrentDevice current(device());
    check(cudaMemset(to, 0, bytes), "cudaMemset");
    finish("cudaMemset");
  }
  void copy(void* to, const void* from, size_t bytes) const override {
    const CurrentDevice current(device());
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
    finish("cudaMemcpy");
  }

 private:
  int index_;
};

class GraphRecording final : public Recording {
 public:
  // Takes over `graph`.
  explicit GraphRecording(cudaGraph_t graph) {
    const cudaError_t status = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "cudaGraphInstantiate");
  }
  ~GraphRecording() override { cudaGraphExecDestroy(executable_); }
  GraphRecording(const GraphRecording&) = delete;
  GraphRecording& operator=(const GraphRecording&) = delete;

  cudaGraphExec_t executable() const { return executable_; }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

class StreamQueue final : public Queue {
 public:
  explicit StreamQueue(int index) : index_(index) {
    const CurrentDevice current({DeviceKind::cuda, index});
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
          "cudaDeviceGetAttribute");
    starts_early_ = major >= 9;
  }
  ~StreamQueue() override { cudaStreamDestroy(stream_); }
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  Device device() const override { return {DeviceKind::cuda, index_}; }
  // From memory that is not pinned the runtime copies the bytes before it returns.
  void upload(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "upload");
  }
  void download(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "download");
  }
  void zero(void* to, size_t bytes) override {
    check(cudaMemsetAsync(to, 0, bytes, stream_), "cudaMemsetAsync");
  }
  std::unique_ptr<Recording> record(const std::function<void()>& put) override {
    const CurrentDevice current(device());
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      put();
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    return std::make_unique<GraphRecording>(graph);
  }
  void replay(const Recording& recording) override {
    const CurrentDevice current(device());
    const auto& graph = dynamic_cast<const GraphRecording&>(recording);
    check(cudaGraphLaunch(graph.executable(), stream_), "cudaGraphLaunch");
  }
  // Kernels fail after they were launched: only a process that waits for each knows which one did.
  void wait() override {
    check(cudaStreamSynchronize(stream_),
          "a kernel or a copy (which one: set CUDA_LAUNCH_BLOCKING=1)");
  }

  cudaStream_t stream() const { return stream_; }
  bool starts_early() const { return starts_early_; }

 private:
  int index_;
  cudaStream_t stream_ = nullptr;
  bool starts_early_ = false;
};

class RuntimeBackend final : public Backend {
 public:
  RuntimeBackend() {
    const cudaError_t status = cudaGetDeviceCount(&count_);
    if (status == cudaSuccess && count_ > 0) {
      int driver = 0;
      check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
      status_ = std::to_string(count_) + (count_ == 1 ? " device" : " devices") +
                ", driver for CUDA " + std::to_string(driver / 1000) + "." +
                std::to_string(driver % 1000 / 10);
    } else {
      cudaGetLastError();
      count_ = 0;
      status_ = std::string("no device: ") +
                (status == cudaSuccess ? "none is visible" : cudaGetErrorString(status));
    }
    for (int i = 0; i < count_; ++i) memories_.push_back(std::make_unique<DeviceMemory>(i));
  }

  int num_devices() const override { return count_; }
  std::string status() const override { return status_; }
  std::string model_name(int index) const override { return properties(index).name; }
  int arch(int index) const override {
    const cudaDeviceProp found = properties(index);
    return found.major * 10 + found.minor;
  }
  int64_t shared_bytes(int index) const override {
    return static_cast<int64_t>(properties(index).sharedMemPerBlockOptin);
  }
  const Memory& memory(int index) const override { return *memories_[static_cast<size_t>(index)]; }
  std::shared_ptr<std::byte> pinned(int index, size_t bytes) const override {
    const CurrentDevice current({DeviceKind::cuda, index});
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, bytes == 0 ? 1 : bytes, cudaHostAllocPortable), "cudaHostAlloc");
    return {static_cast<std::byte*>(memory), [](std::byte* pointer) { cudaFreeHost(pointer); }};
  }
  std::unique_ptr<Queue> make_queue(int index) const override {
    return std::make_unique<StreamQueue>(index);
  }
  void register_kernels() const override { register_cuda(); }

 private:
  static cudaDeviceProp properties(int index) {
    cudaDeviceProp found;
    check(cudaGetDeviceProperties(&found, index), "cudaGetDeviceProperties");
    return found;
  }

  int count_ = 0;
  std::string status_;
  std::vector<std::unique_ptr<DeviceMemory>> memories_;
};

}  // namespace

cudaStream_t stream_of(const Queue& queue) {
  return dynamic_cast<const StreamQueue&>(queue).stream();
}

bool starts_early(const Queue& queue) {
  return dynamic_cast<const StreamQueue&>(queue).starts_early();
}

}  // namespace effinfer::cuda

namespace effinfer {

const Backend* cuda_backend() {
  static const cuda::RuntimeBackend backend;
  return &backend;
}

}  // namespace effinfer
