// For host_unit.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <stdexcept>

#include "gpu/fiber.h"

namespace effinfer::cuda::host {

// The shared memory of a block, between two stretches that nothing may write to.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes)
      : bytes_(bytes),
        all_(bytes + 2 * kGuard + kGuard - bytes % kGuard),
        memory_(static_cast<unsigned char*>(::operator new(all_, std::align_val_t{kGuard}))) {}
  ~SharedMemory() {
    unpoison(memory_, all_);
    ::operator delete(memory_, std::align_val_t{kGuard});
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return memory_ + kGuard; }
  void begin_block() {
    const Unseen unseen;
    unpoison(memory_, all_);
    std::memset(memory_, kFill, all_);
    poison(memory_, kGuard);
    poison(memory_ + kGuard + bytes_, all_ - kGuard - bytes_);
  }
  void end_block() {
    const Unseen unseen;
    unpoison(memory_, all_);
    const auto untouched = [](unsigned char byte) { return byte == kFill; };
    if (!std::all_of(memory_, memory_ + kGuard, untouched) ||
        !std::all_of(memory_ + kGuard + bytes_, memory_ + all_, untouched)) {
      throw std::logic_error("shared memory: written to beyond its ends");
    }
  }

 private:
  static constexpr size_t kGuard = 1024;        // what a block's memory is aligned to
  static constexpr unsigned char kFill = 0xff;  // NaN of every type
  size_t bytes_;
  size_t all_;
  unsigned char* memory_;
};

}  // namespace effinfer::cuda::host
