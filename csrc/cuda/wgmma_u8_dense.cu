#include "cuda/wgmma_formats.h"

namespace effinfer::cuda {

void launch_wgmma_u8_dense(const ops::PackedFormat& format, const ops::Operand& x,
                           WgmmaParams& params, Queue& queue) {
  launch_wgmma_formats<ops::QuantBits::u8, ops::QuantBits::bf16, ops::QuantBits::f16>(
      format, x, params, queue);
}

}  // namespace effinfer::cuda
