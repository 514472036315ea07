// How copy_tile() of kernels finds boxes of a matrix.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// A matrix of 16-bit numbers, and a box of it.
struct TileSource {
  const void* data = nullptr;  // of the device, 16-byte aligned
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_bytes = 0;  // from row to row, a multiple of 16
  int box_rows = 0;       // at most 256
  int box_cols = 0;       // as many as a swizzled row holds, or 256
  Swizzle swizzle = Swizzle::none;
};

// Throws DeviceError.
TensorMap tensor_map(const TileSource& source, Queue& queue);

}  // namespace effinfer::cuda
