// The memory of a device: what arenas, packed weights, constants and KV pages are made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "effinfer/device.h"

namespace effinfer {

enum class Pages : uint8_t {
  heap,  // for small things; contents undefined
  lazy,  // a mapping of its own: zeros, which take memory when they are first written
  // Zeros. From one huge page (2 MB) upwards it is a lazy mapping that asks for huge pages:
  // streaming weights through 4 KB pages costs a TLB miss every 64 lines and stops the hardware
  // prefetcher at every page's end.
  huge,
};

class Memory {
 public:
  virtual ~Memory() = default;
  virtual Device device() const = 0;
  // What this process may have of it: of a GPU's what is free.
  virtual size_t capacity() const = 0;
  // At least 64-byte aligned, and on a system page with Pages::lazy; freed with the last copy of
  // the handle. Null when there is no memory.
  virtual std::shared_ptr<void> allocate(size_t bytes, Pages pages) const = 0;
  virtual void zero(void* to, size_t bytes) const = 0;
  // Within the device, and between it and the host's memory.
  virtual void copy(void* to, const void* from, size_t bytes) const = 0;
};

// Zeros in these bytes of a lazy mapping of the CPU's memory, whose whole system pages take no
// memory until they are written again.
void zero_lazily(void* from, size_t bytes);

// Lives as long as the process. Throws InvalidArgument for a device that this build lacks.
const Memory& memory_of(Device device);

}  // namespace effinfer
