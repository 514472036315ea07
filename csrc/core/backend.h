// What the core asks of a kind of device other than the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/memory.h"
#include "effinfer/device.h"
#include "effinfer/executor.h"

namespace effinfer {

// Moments in a queue's work, taken by its device.
class Marks {
 public:
  virtual ~Marks() = default;
  // Number `index` becomes when all that the queue has by now has run.
  virtual void put(size_t index) = 0;
  // Nanoseconds from one to a later one; the queue has been waited for.
  virtual int64_t between(size_t first, size_t last) const = 0;
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
  // Its second cache.
  virtual int64_t l2_bytes(int index) const = 0;
  virtual const Memory& memory(int index) const = 0;
  // The host's memory from where and to where copies are fastest. Throws OutOfMemory.
  virtual std::shared_ptr<std::byte> pinned(int index, size_t bytes) const = 0;
  virtual std::unique_ptr<Queue> make_queue(int index) const = 0;
  virtual std::unique_ptr<Queue> wrap_stream(int index, void* stream) const = 0;
  // `count` of them; the queue outlives them.
  virtual std::unique_ptr<Marks> make_marks(Queue& queue, size_t count) const = 0;
  virtual void register_kernels() const = 0;
};

// CUDA's, or null in a library that was built without it: the symbol is csrc/cuda's.
const Backend* cuda_backend();

}  // namespace effinfer
