#include <cuda_runtime_api.h>

#include "bench/gpu/device.h"
#include "cuda/stream.h"

namespace bench {
namespace {

using effinfer::cuda::check;
using effinfer::cuda::stream_of;

class GraphRecording final : public Recording {
 public:
  GraphRecording(effinfer::Queue& queue, const std::function<void()>& enqueue)
      : stream_(stream_of(queue)) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "begin of a capture");
    enqueue();
    check(cudaStreamEndCapture(stream_, &graph), "end of a capture");
    const cudaError_t status = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "cudaGraphInstantiate");
    check(cudaEventCreate(&start_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~GraphRecording() override {
    cudaEventDestroy(start_);
    cudaEventDestroy(end_);
    cudaGraphExecDestroy(graph_);
  }
  GraphRecording(const GraphRecording&) = delete;
  GraphRecording& operator=(const GraphRecording&) = delete;

  double run() override {
    check(cudaEventRecord(start_, stream_), "cudaEventRecord");
    check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check(cudaEventSynchronize(end_), "a recorded graph");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start_, end_), "cudaEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t graph_ = nullptr;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

}  // namespace

std::unique_ptr<Recording> record(effinfer::Queue& queue, std::function<void()> enqueue) {
  return std::make_unique<GraphRecording>(queue, enqueue);
}

void copy_on_device(effinfer::Queue& queue, void* to, const void* from, size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(queue)), "a copy");
}

DeviceFacts device_facts() {
  DeviceFacts facts;
  cudaDeviceProp found;
  check(cudaGetDeviceProperties(&found, 0), "cudaGetDeviceProperties");
  facts.name = found.name;
  facts.arch = found.major * 10 + found.minor;
  facts.multiprocessors = found.multiProcessorCount;
  facts.l2_bytes = found.l2CacheSize;
  size_t free = 0;
  size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  facts.free_bytes = static_cast<int64_t>(free);
  check(cudaRuntimeGetVersion(&facts.runtime), "cudaRuntimeGetVersion");
  check(cudaDriverGetVersion(&facts.driver), "cudaDriverGetVersion");
  return facts;
}

}  // namespace bench
