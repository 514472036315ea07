#include "cuda/wgmma_formats.h"

namespace effinfer::cuda {

void launch_wgmma_u4(const ops::PackedFormat& format, const ops::Operand& x, WgmmaParams& params,
                     Queue& queue) {
  launch_wgmma_formats<ops::QuantBits::u4>(format, x, params, queue);
}

}  // namespace effinfer::cuda
