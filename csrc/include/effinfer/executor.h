// Where an operator runs: on the threads of a pool, or on a GPU in the order of a queue.
//
//   ops::rmsnorm(input, weight, {}, out, pool);    // tensors of the CPU; has run on return
//   ops::rmsnorm(input, weight, {}, out, *queue);  // of the queue's device; runs behind what the
//                                                  // queue has, and nobody waits
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "effinfer/device.h"
#include "effinfer/export.h"
#include "effinfer/threads.h"

namespace effinfer {

// Kernels of a queue, with all that they were given, to be put into it again at the cost of one.
class EFFINFER_API Recording {
 public:
  virtual ~Recording();
};

// The order of a device's work: what is put into a queue runs after what was put there before. A
// thread at a time.
class EFFINFER_API Queue {
 public:
  virtual ~Queue();
  virtual Device device() const = 0;
  // What it has in common with other queues over the same stream.
  virtual const void* stream() const = 0;
  // The host's bytes may change once upload() has returned, those of pinned memory once wait() has,
  // when they have arrived.
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;
  virtual void zero(void* to, size_t bytes) = 0;
  // Memory for work that follows in the queue; given back behind all that the queue has when the
  // last handle goes. Handles may outlive the queue, but not a caller's stream that it is over.
  // Throws OutOfMemory.
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;
  // What is put here from now on runs after all that `other`, of the same device, has.
  virtual void follow(Queue& other) = 0;
  // Calls `put`, which puts kernels into the queue, and keeps them instead of running them. Kernels
  // that never ran before may have to be loaded first, which cannot be recorded.
  virtual std::unique_ptr<Recording> record(const std::function<void()>& put) = 0;
  // Of a recording that this queue made; it outlives the work.
  virtual void replay(const Recording& recording) = 0;
  // Until all of it has run. Throws DeviceError with the name of a kernel that failed.
  virtual void wait() = 0;
};

// These throw InvalidArgument for a device that this build lacks and for the CPU, whose work goes
// to thread pools. Over a stream of its own:
EFFINFER_API std::unique_ptr<Queue> make_queue(Device device);
// Over a caller's stream: a cudaStream_t; null is the legacy default stream. It must outlive what
// is put into it, and plans of attention that were run there.
EFFINFER_API std::unique_ptr<Queue> wrap_stream(Device device, void* stream);

// A GPU's memory, given back with the last handle, for which the host may wait until the device has
// done all its work. Throws OutOfMemory.
EFFINFER_API std::shared_ptr<void> allocate_memory(Device device, size_t bytes);

class Executor {
 public:
  Executor(ThreadPool& pool) : pool_(&pool) {}  // NOLINT: operators take either
  Executor(Queue& queue) : queue_(&queue) {}    // NOLINT

  Device device() const { return queue_ == nullptr ? Device{} : queue_->device(); }
  // One of them is null.
  ThreadPool* pool() const { return pool_; }
  Queue* queue() const { return queue_; }

 private:
  ThreadPool* pool_ = nullptr;
  Queue* queue_ = nullptr;
};

}  // namespace effinfer
