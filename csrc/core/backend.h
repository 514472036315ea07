// What the core asks of a kind of device other than the CPU.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "core/memory.h"
#include "effinfer/device.h"

namespace effinfer {

// Kernels of a queue, with all that they were given, to be put into it again at the cost of one.
class Recording {
 public:
  virtual ~Recording() = default;
};

// The order of a device's work: what is put into a queue runs after what was put there before. A
// thread at a time.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual Device device() const = 0;
  // The host's bytes may change once upload() has returned, those of pinned memory once wait() has,
  // when they have arrived.
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;
  virtual void zero(void* to, size_t bytes) = 0;
  // Calls `put`, which puts kernels into the queue, and keeps them instead of running them. Kernels
  // that never ran before may have to be loaded first, which cannot be recorded.
  virtual std::unique_ptr<Recording> record(const std::function<void()>& put) = 0;
  // Of a recording that this queue made; it outlives the work.
  virtual void replay(const Recording& recording) = 0;
  // Until all of it has run. Throws DeviceError with the name of a kernel that failed.
  virtual void wait() = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual int num_devices() const = 0;
  // Why there is no device, or what drives those that there are.
  virtual std::string status() const = 0;
  virtual std::string model_name(int index) const = 0;
  // Compute capability times ten: 80 is Ampere, 90 Hopper.
  virtual int arch(int index) const = 0;
  // Memory that the threads of a block may share.
  virtual int64_t shared_bytes(int index) const = 0;
  virtual const Memory& memory(int index) const = 0;
  // The host's memory from where and to where copies are fastest. Throws OutOfMemory.
  virtual std::shared_ptr<std::byte> pinned(int index, size_t bytes) const = 0;
  virtual std::unique_ptr<Queue> make_queue(int index) const = 0;
  virtual void register_kernels() const = 0;
};

// CUDA's, or null in a library that was built without it: the symbol is csrc/cuda's.
const Backend* cuda_backend();

// Throws InvalidArgument for a device that this build lacks and for the CPU, whose work goes to
// thread pools.
std::unique_ptr<Queue> make_queue(Device device);

}  // namespace effinfer
