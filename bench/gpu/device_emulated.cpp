// Times mean nothing here: what this proves is that the benchmark's problems are right.
#include <chrono>

#include "bench/gpu/device.h"

namespace bench {
namespace {

class RepeatedWork final : public Recording {
 public:
  RepeatedWork(effinfer::Queue& queue, std::function<void()> enqueue)
      : queue_(queue), enqueue_(std::move(enqueue)) {}

  double run() override {
    const auto start = std::chrono::steady_clock::now();
    enqueue_();
    queue_.wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  effinfer::Queue& queue_;
  std::function<void()> enqueue_;
};

}  // namespace

std::unique_ptr<Recording> record(effinfer::Queue& queue, std::function<void()> enqueue) {
  return std::make_unique<RepeatedWork>(queue, std::move(enqueue));
}

// Its memory is the host's, so what a queue downloads may stay there.
void copy_on_device(effinfer::Queue& queue, void* to, const void* from, size_t bytes) {
  queue.download(to, from, bytes);
}

DeviceFacts device_facts() {
  const effinfer::Backend& backend = *effinfer::cuda_backend();
  return {backend.model_name(0), backend.arch(0), 1, 1 << 16, 1 << 28, 0, 0};
}

}  // namespace bench
