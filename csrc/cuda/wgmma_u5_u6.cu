#include "cuda/wgmma_formats.h"

namespace effinfer::cuda {

void launch_wgmma_u5_u6(const ops::PackedFormat& format, const ops::Operand& x, WgmmaParams& params,
                        Queue& queue) {
  launch_wgmma_formats<ops::QuantBits::u5, ops::QuantBits::u6>(format, x, params, queue);
}

}  // namespace effinfer::cuda
