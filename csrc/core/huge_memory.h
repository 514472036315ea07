// Large buffers: zeroed pages of the system, huge where it gives them.
#pragma once

#include <cstddef>
#include <memory>

namespace effinfer {

// Allocates memory that is at least 64-byte aligned. From one huge page (2 MB) upwards it is a
// mapping of its own that asks for huge pages: streaming weights through 4 KB pages costs a TLB
// miss every 64 lines and stops the hardware prefetcher at every page's end. Pages take memory when
// first touched. Null when there is no memory.
std::shared_ptr<void> allocate_huge(size_t bytes);

}  // namespace effinfer
