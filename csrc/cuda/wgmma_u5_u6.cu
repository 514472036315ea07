#include "cuda/wgmma_launch.h"

namespace effinfer::cuda {

void launch_wgmma_u5_u6(const ops::PackedFormat& format, const ops::Operand& x,
                        const TileParams& tile, Queue& queue) {
  launch_wgmma_formats<ops::QuantBits::u5, ops::QuantBits::u6>(format, x, tile, queue);
}

}  // namespace effinfer::cuda
