// Random numbers of schedules.
#pragma once

#include <cstddef>
#include <cstdint>

namespace effinfer::cuda::host {

// SplitMix64: schedules need many numbers, and only that they differ.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  uint64_t operator()() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  }
  // 0 to count - 1.
  size_t below(size_t count) { return ((*this)() >> 32) * count >> 32; }

 private:
  uint64_t state_;
};

}  // namespace effinfer::cuda::host
