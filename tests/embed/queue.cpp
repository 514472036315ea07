// An operator on arrays in a GPU's memory, in a stream of the caller's:  queue DEVICE
// Prints the rows of the result, one number a line.
#include <effinfer/effinfer.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

namespace {

constexpr int64_t kRows = 3, kCols = 8;
constexpr size_t kBytes = kRows * kCols * sizeof(float);

effinfer::StridedView on(effinfer::Device device, void* data) {
  effinfer::StridedView view =
      effinfer::StridedView::dense(data, effinfer::DType::f32, {kRows, kCols});
  view.device = device;
  return view;
}

void run(effinfer::Device device) {
  std::vector<float> x(kRows * kCols), weight(kCols), out(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 37 % 17) / 4 - 2;
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = 1 + static_cast<float>(i) / 8;

  // Whoever has the CUDA runtime passes a cudaStream_t; this is cudaStreamPerThread.
  void* const stream = reinterpret_cast<void*>(uintptr_t{2});
  const std::unique_ptr<effinfer::Queue> queue = effinfer::wrap_stream(device, stream);
  const std::shared_ptr<void> x_there = queue->allocate(kBytes);
  const std::shared_ptr<void> out_there = queue->allocate(kBytes);
  const std::shared_ptr<void> weight_there =
      effinfer::allocate_memory(device, kCols * sizeof(float));
  queue->upload(x_there.get(), x.data(), kBytes);
  queue->upload(weight_there.get(), weight.data(), kCols * sizeof(float));
  effinfer::ops::rmsnorm(on(device, x_there.get()),
                         {weight_there.get(), effinfer::DType::f32, {kCols}, device}, {},
                         on(device, out_there.get()), *queue);
  queue->download(out.data(), out_there.get(), kBytes);
  queue->wait();
  for (const float value : out) std::printf("%.9g\n", static_cast<double>(value));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: queue DEVICE\n");
    return 2;
  }
  try {
    run(effinfer::parse_device(argv[1]));
  } catch (const effinfer::Error& error) {
    std::fprintf(stderr, "queue: %s\n", error.what());
    return 1;
  }
  return 0;
}
