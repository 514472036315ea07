// Queues: the order of work, recordings, pinned memory.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "core/backend.h"
#include "cpp/check.h"
#include "gpu/device_arrays.h"
#include "ops/elementwise.h"

using namespace effinfer;

namespace {

constexpr size_t kSize = 300;

// x += x.
void put_double(const DeviceArray<float>& x, Queue& queue) {
  ops::BinaryProblem problem;
  problem.a = problem.b = problem.out = x.data();
  problem.size = static_cast<int64_t>(x.size());
  ops::table<ops::BinaryProblem>().select(problem, current_target(kGpu)).launch(problem, queue);
}

std::vector<float> all(float value) {
  return std::vector<float>(kSize, value);
}

}  // namespace

TEST("what is recorded runs when it is replayed, each time, on what lies there then") {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  const DeviceArray<float> x(all(1));
  put_double(x, *queue);
  const std::unique_ptr<Recording> recording = queue->record([&] {
    put_double(x, *queue);
    put_double(x, *queue);
  });
  queue->wait();
  CHECK(x.values() == all(2));
  queue->replay(*recording);
  queue->replay(*recording);
  queue->wait();
  CHECK(x.values() == all(32));
  const std::vector<float> threes = all(3);
  queue->upload(x.data(), threes.data(), kSize * sizeof(float));
  queue->replay(*recording);
  queue->wait();
  CHECK(x.values() == all(12));
}

TEST("an error while recording leaves the queue as it was") {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  const DeviceArray<float> x(all(1));
  put_double(x, *queue);
  const auto put = [&] {
    put_double(x, *queue);
    throw std::runtime_error("stop");
  };
  CHECK_THROWS(std::runtime_error, "stop", queue->record(put));
  put_double(x, *queue);
  queue->wait();
  CHECK(x.values() == all(4));
}

TEST("copies from and to pinned memory") {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  const DeviceArray<float> x(all(0));
  const size_t bytes = kSize * sizeof(float);
  const std::shared_ptr<std::byte> memory = cuda_backend()->pinned(0, bytes);
  std::memcpy(memory.get(), all(5).data(), bytes);
  queue->upload(x.data(), memory.get(), bytes);
  put_double(x, *queue);
  queue->wait();
  queue->download(memory.get(), x.data(), bytes);
  queue->wait();
  CHECK(std::memcmp(memory.get(), all(10).data(), bytes) == 0);
}

TEST("marks take the time of what lies between them") {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  const DeviceArray<float> x(all(1));
  const std::unique_ptr<Marks> marks = cuda_backend()->make_marks(*queue, 3);
  for (int round = 0; round < 2; ++round) {
    marks->put(0);
    put_double(x, *queue);
    marks->put(1);
    for (int i = 0; i < 40; ++i) put_double(x, *queue);
    marks->put(2);
    queue->wait();
    CHECK(marks->between(0, 1) > 0);
    CHECK(marks->between(1, 2) > marks->between(0, 1));
    const int64_t parts = marks->between(0, 1) + marks->between(1, 2);
    CHECK(std::abs(marks->between(0, 2) - parts) <= 2000);  // events count half microseconds
  }
}

CHECK_MAIN()
