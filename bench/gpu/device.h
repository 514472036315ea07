// What the benchmark asks of the device beyond csrc/core/backend.h: on a GPU by CUDA's graphs and
// events (device_cuda.cpp), in the emulator of the tests by the host's clock (device_emulated.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/backend.h"

namespace bench {

// Work that is put into a queue once and run again and again: a CUDA graph, as a decode step is, so
// that the host's launches take no part in its time.
class Recording {
 public:
  virtual ~Recording() = default;
  // Seconds, by the device's clock; it has ended.
  virtual double run() = 0;
};

// `enqueue` puts the work into `queue`, which outlives the recording.
std::unique_ptr<Recording> record(effinfer::Queue& queue, std::function<void()> enqueue);

// Puts a copy inside the device's memory into `queue`.
void copy_on_device(effinfer::Queue& queue, void* to, const void* from, size_t bytes);

struct DeviceFacts {
  std::string name;
  int arch = 0;
  int multiprocessors = 0;
  int64_t l2_bytes = 0;
  int64_t free_bytes = 0;  // of its memory
  int runtime = 0;         // versions, 1000 times the major one
  int driver = 0;
};
DeviceFacts device_facts();

}  // namespace bench
