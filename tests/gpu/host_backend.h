// The emulator as a device: "cuda:0" of a program that links it. Its memory is the host's, which
// only kernels and the copies of queues may touch: anything else faults.
#pragma once

#include <cstddef>
#include <cstdint>

namespace effinfer::cuda::host {

// Of the order in which threads and blocks run, from now on.
void set_seed(uint64_t seed);

// Of the device's memory: what an emulated GPU has, and what it says that it does in a second.
struct MemoryFacts {
  size_t bytes = size_t{4} << 30;
  double copy_rate = 1e12;
};
void set_memory(const MemoryFacts& facts);

// Whether all of these bytes lie in one piece of the device's memory.
bool is_allocated(const void* first, size_t bytes);

// Of recordings of all queues, so far.
int64_t num_replays();

}  // namespace effinfer::cuda::host
