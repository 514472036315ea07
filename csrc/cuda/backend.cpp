// The CUDA runtime as a backend.
#include "core/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/copy_rate.h"
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

constexpr size_t kMostDevices = 64;
constexpr uint64_t kKeptBytes = uint64_t{256} << 20;
constexpr size_t kCopiedBytes = size_t{256} << 20;
constexpr size_t kCopies = 4;

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

// Memory in the order of streams. What is given back stays with the pool for whoever asks next,
// where CUDA's own default is to return it to the driver at each synchronisation.
cudaMemPool_t pool_of(int index) {
  cudaMemPool_t pool = nullptr;
  check(cudaDeviceGetDefaultMemPool(&pool, index), "cudaDeviceGetDefaultMemPool");
  static std::array<std::once_flag, kMostDevices> kept;
  std::call_once(kept.at(static_cast<size_t>(index)), [&] {
    uint64_t threshold = 0;
    check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold),
          "cudaMemPoolGetAttribute");
    threshold = std::max(threshold, kKeptBytes);
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold),
          "cudaMemPoolSetAttribute");
  });
  return pool;
}

// A stream, of the queue's own or a caller's.
struct Stream {
  cudaStream_t stream = nullptr;
  bool is_own = false;

  ~Stream() {
    if (is_own) cudaStreamDestroy(stream);
  }
  Stream(cudaStream_t given, bool owned) : stream(given), is_own(owned) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
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
    const CurrentDevice current(device());
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    handle_ = std::make_shared<Stream>(stream, true);
    stream_ = stream;
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
          "cudaDeviceGetAttribute");
    starts_early_ = (EFFINFER_CUDA_WAITING >> major & 1) != 0;
  }
  StreamQueue(int index, cudaStream_t stream)
      : index_(index), handle_(std::make_shared<Stream>(stream, false)), stream_(stream) {}

  Device device() const override { return {DeviceKind::cuda, index_}; }
  const void* stream() const override { return stream_; }
  std::shared_ptr<void> allocate(size_t bytes) override {
    const CurrentDevice current(device());
    void* memory = nullptr;
    check(cudaMallocFromPoolAsync(&memory, bytes == 0 ? 1 : bytes, pool_of(index_), stream_),
          "cudaMallocFromPoolAsync");
    return {memory, [stream = handle_](void* pointer) { cudaFreeAsync(pointer, stream->stream); }};
  }
  void follow(Queue& other) override {
    const CurrentDevice current(device());
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    const std::unique_ptr<CUevent_st, decltype(&cudaEventDestroy)> owner(event, cudaEventDestroy);
    check(cudaEventRecord(event, stream_of(other)), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream_, event, 0), "cudaStreamWaitEvent");
  }
  // From memory that is not pinned the runtime copies the bytes before it returns.
  void upload(void* to, const void* from, size_t bytes) override {
    if (!handle_->is_own) refuse_capture();
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

  cudaStream_t handle() const { return stream_; }
  bool starts_early() const { return starts_early_; }

 private:
  // A recording would read the host's bytes when it is replayed, wherever they are then.
  void refuse_capture() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream_, &status), "cudaStreamIsCapturing");
    if (status == cudaStreamCaptureStatusNone) return;
    throw Unsupported(
        "[queue] upload: expected a stream that records no graph, got one that does: run a plan of "
        "attention in it once before, and rotate by a table");
  }

  int index_;
  std::shared_ptr<Stream> handle_;
  cudaStream_t stream_ = nullptr;
  bool starts_early_ = false;
};

class EventMarks final : public Marks {
 public:
  EventMarks(StreamQueue& queue, size_t count) : queue_(queue) {
    const CurrentDevice current(queue.device());
    while (events_.size() < count) {
      cudaEvent_t event = nullptr;
      check(cudaEventCreate(&event), "cudaEventCreate");
      events_.emplace_back(event);
    }
  }
  void put(size_t index) override {
    const CurrentDevice current(queue_.device());
    check(cudaEventRecord(events_.at(index).get(), queue_.handle()), "cudaEventRecord");
  }
  int64_t between(size_t first, size_t last) const override {
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, events_.at(first).get(), events_.at(last).get()),
          "cudaEventElapsedTime");
    return static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
  }

 private:
  struct Destroy {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  StreamQueue& queue_;
  std::vector<std::unique_ptr<CUevent_st, Destroy>> events_;
};

class RuntimeBackend final : public Backend {
 public:
  RuntimeBackend() {
    const cudaError_t status = cudaGetDeviceCount(&count_);
    int driver = 0;  // as where there is none
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    const std::string found = "driver for CUDA " + std::to_string(driver / 1000) + "." +
                              std::to_string(driver % 1000 / 10);
    if (status == cudaSuccess && count_ > 0) {
      status_ = std::to_string(count_) + (count_ == 1 ? " device, " : " devices, ") + found;
    } else {
      cudaGetLastError();
      count_ = 0;
      status_ = std::string("no device: ") +
                (status == cudaSuccess ? "none is visible" : cudaGetErrorString(status));
      const std::string needed =
          "expected a driver for CUDA " + std::to_string(CUDART_VERSION / 1000) + " or later";
      if (status == cudaErrorInsufficientDriver) {
        status_ += "; " + needed + ", found " + (driver == 0 ? "none" : "a " + found);
      }
    }
    for (int i = 0; i < count_; ++i) memories_.push_back(std::make_unique<DeviceMemory>(i));
  }

  int num_devices() const override { return count_; }
  std::string status() const override { return status_; }
  std::string model_name(int index) const override { return properties(index).name; }
  int arch(int index) const override {
    return attribute(cudaDevAttrComputeCapabilityMajor, index) * 10 +
           attribute(cudaDevAttrComputeCapabilityMinor, index);
  }
  int64_t shared_bytes(int index) const override {
    return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  }
  int64_t l2_bytes(int index) const override { return attribute(cudaDevAttrL2CacheSize, index); }
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
  std::unique_ptr<Queue> wrap_stream(int index, void* stream) const override {
    auto* given = static_cast<cudaStream_t>(stream);
    return std::make_unique<StreamQueue>(index, given == nullptr ? cudaStreamLegacy : given);
  }
  std::unique_ptr<Marks> make_marks(Queue& queue, size_t count) const override {
    return std::make_unique<EventMarks>(dynamic_cast<StreamQueue&>(queue), count);
  }
  void register_kernels() const override { register_cuda(); }

 private:
  static cudaDeviceProp properties(int index) {
    cudaDeviceProp found;
    check(cudaGetDeviceProperties(&found, index), "cudaGetDeviceProperties");
    return found;
  }
  // Each operator's call asks for some: all properties at once would take a hundred times longer.
  static int attribute(cudaDeviceAttr attribute, int index) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, index), "cudaDeviceGetAttribute");
    return value;
  }

  int count_ = 0;
  std::string status_;
  std::vector<std::unique_ptr<DeviceMemory>> memories_;
};

// The best of a few copies, each of more than the second cache holds.
double copy_rate(int index) {
  const DeviceMemory memory(index);
  const size_t bytes = std::min(kCopiedBytes, memory.capacity() / 8);
  const std::shared_ptr<void> from = memory.allocate(bytes, Pages::huge);
  const std::shared_ptr<void> to = memory.allocate(bytes, Pages::huge);
  if (!from || !to) throw OutOfMemory("[cuda] no memory to measure its rate");
  StreamQueue queue(index);
  EventMarks marks(queue, kCopies + 1);
  for (size_t i = 0; i < kCopies; ++i) {
    marks.put(i);
    check(cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice, queue.handle()),
          "cudaMemcpyAsync");
  }
  marks.put(kCopies);
  queue.wait();
  int64_t least = marks.between(0, 1);
  for (size_t i = 1; i < kCopies; ++i) least = std::min(least, marks.between(i, i + 1));
  return 2e9 * static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(least, 1));
}

}  // namespace

cudaStream_t stream_of(const Queue& queue) {
  return dynamic_cast<const StreamQueue&>(queue).handle();
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

double cuda_copy_rate(int index) {
  return cuda::copy_rate(index);
}

}  // namespace effinfer
