// How much memory there is.
#pragma once

#include <cstddef>

namespace effinfer::runtime {

// The machine's memory, or the limit of this process's control group when that is less.
size_t physical_memory_bytes();

}  // namespace effinfer::runtime
