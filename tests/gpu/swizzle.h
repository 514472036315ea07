// Where bytes of swizzled tiles lie in shared memory, counted from a multiple of 1024.
#pragma once

#include <cstddef>

#include "cuda/unit.h"

namespace effinfer::cuda::host {

// Bytes of a row that is swizzled, or of a piece where none is.
inline size_t swizzled_row_bytes(Swizzle swizzle) {
  constexpr size_t kBytes[] = {16, 128, 64, 32};
  return kBytes[static_cast<size_t>(swizzle)];
}

// Bits 4 and up of an address are changed by as many from 7 on.
inline size_t swizzled(size_t offset, Swizzle swizzle) {
  const size_t mask = swizzled_row_bytes(swizzle) / 16 - 1;
  return offset ^ (offset >> 7 & mask) << 4;
}

}  // namespace effinfer::cuda::host
