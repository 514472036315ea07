#include "cuda/wgmma_launch.h"

namespace effinfer::cuda {

void launch_wgmma_u4(const ops::PackedFormat& format, const ops::Operand& x, const TileParams& tile,
                     Queue& queue) {
  launch_wgmma_formats<ops::QuantBits::u4>(format, x, tile, queue);
}

}  // namespace effinfer::cuda
