// What tests of GPU kernels share: arrays in the device's memory, and running one problem there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "core/backend.h"
#include "core/memory.h"
#include "effinfer/device.h"
#include "ops/registry.h"

namespace effinfer {

inline constexpr Device kGpu{DeviceKind::cuda, 0};

// By copies inside the device, each of twice as much.
inline void fill_device(void* to, size_t bytes, uint8_t value) {
  const std::vector<uint8_t> first(std::min(bytes, size_t{1} << 16), value);
  const Memory& memory = memory_of(kGpu);
  auto* place = static_cast<uint8_t*>(to);
  for (size_t done = 0; done < bytes;) {
    const size_t count = std::min(bytes - done, done == 0 ? first.size() : done);
    memory.copy(place + done, done == 0 ? first.data() : place, count);
    done += count;
  }
}

template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    if (!values.empty()) memory_of(kGpu).copy(data(), values.data(), values.size() * sizeof(T));
  }
  // NaN.
  explicit DeviceArray(size_t size)
      : size_(size), memory_(memory_of(kGpu).allocate(size * sizeof(T), Pages::heap)) {
    if (!memory_) throw std::bad_alloc();
    fill_device(memory_.get(), size * sizeof(T), 0xff);
  }
  T* data() const { return static_cast<T*>(memory_.get()); }
  size_t size() const { return size_; }
  std::vector<T> values() const {
    std::vector<T> out(size_);
    if (size_ > 0) memory_of(kGpu).copy(out.data(), data(), size_ * sizeof(T));
    return out;
  }

 private:
  size_t size_ = 0;
  std::shared_ptr<void> memory_;
};

// Runs a problem whose pointers are the device's, until it has ended.
template <class Problem>
void run_on_gpu(const Problem& problem) {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  ops::table<Problem>().select(problem, current_target(kGpu)).launch(problem, *queue);
  queue->wait();
}

}  // namespace effinfer
