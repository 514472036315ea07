// Tensor maps of the emulated device.
#pragma once

#include <cstdint>

#include "cuda/tensor_map.h"

namespace effinfer::cuda::host {

// What the 128 bytes of a TensorMap are here.
struct HostTensorMap {
  static constexpr uint64_t kMark = 0x70616d726f736e74;
  uint64_t mark = 0;
  TileSource source;
};

// Throws std::logic_error if it is none.
HostTensorMap decoded(const TensorMap& map);

}  // namespace effinfer::cuda::host
