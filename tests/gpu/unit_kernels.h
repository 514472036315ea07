// Kernels of test_unit.cpp: words in, words out.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/check.h"
#include "cuda/entry.h"
#include "cuda/tensor_map.h"
#include "gpu/device_arrays.h"
#include "gpu/hopper_device.h"

namespace effinfer::cuda {

struct WordParams {
  TensorMap map;
  const uint32_t* in;
  uint32_t* out;
};

// Body: kThreads, Shared, run(unit, params, shared).
template <class Body>
struct WordKernel {
  static constexpr const char* kName = "unit";
  static constexpr int kThreads = Body::kThreads;
  static constexpr int kMinBlocks = 1;
  using Params = WordParams;
  using Shared = typename Body::Shared;
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    Body::run(unit, p, shared);
  }
};

template <class Body>
struct HopperKernel : WordKernel<Body> {
  static constexpr int kArch = 90;
};

// Runs a kernel some times, which must always give the same.
template <class Kernel>
std::vector<uint32_t> words_of(const std::vector<uint32_t>& in, size_t count, int64_t blocks = 1,
                               const TileSource* source = nullptr) {
  const DeviceArray<uint32_t> there(in);
  std::vector<uint32_t> first;
  for (int time = 0; time < 5; ++time) {
    const std::unique_ptr<Queue> queue = make_queue(kGpu);
    const DeviceArray<uint32_t> out(std::vector<uint32_t>(count, 0xdeadbeef));
    WordParams params{{}, there.data(), out.data()};
    if (source != nullptr) {
      TileSource own = *source;
      own.data = there.data();
      params.map = tensor_map(own, *queue);
    }
    launch<Kernel>(params, blocks, *queue);
    queue->wait();
    const std::vector<uint32_t> now = out.values();
    if (time > 0) CHECK(now == first);
    first = now;
  }
  return first;
}

}  // namespace effinfer::cuda
