// Matmuls of bf16 operands with weights that are rounded to bfloat16, on a GPU of compute
// capability 9.0: the kernels of bodies/wgmma_matmul.h.
#pragma once

#include <array>

#include "ops/matmul.h"

namespace effinfer::cuda {

struct WgmmaParams;

// Multiplies the parts that `takes` names, which have one format of kStreamFormats; all of them
// where there is GLU.
void multiply_wgmma(const ops::MatmulProblem& problem,
                    const std::array<bool, ops::kMaxMatmulParts>& takes, Queue& queue);

// Of a block of the largest kernel.
inline constexpr size_t kWgmmaSharedBytes = (128 << 10) + 1024;

// Kernels take long to compile, so some files share them. `params` lacks the map of x and the
// numbers of blocks.
void launch_wgmma_u4(const ops::PackedFormat& format, const ops::Operand& x, WgmmaParams& params,
                     Queue& queue);
void launch_wgmma_u5_u6(const ops::PackedFormat& format, const ops::Operand& x, WgmmaParams& params,
                        Queue& queue);
void launch_wgmma_u8_dense(const ops::PackedFormat& format, const ops::Operand& x,
                           WgmmaParams& params, Queue& queue);

}  // namespace effinfer::cuda
