// Attention with heads of more dims than other kernels of GPUs take: latent attention, whose tiles
// planning and the kernel agree on.
#pragma once

#include <cstdint>

namespace effinfer::ops {

inline constexpr int32_t kGpuMostHeadDim = 256;  // of what is not latent
// Rows times heads of a tile: a block's warps have 32 rows of 512 dims twice in registers.
inline constexpr int32_t kGpuLatentRows = 32;

}  // namespace effinfer::ops
