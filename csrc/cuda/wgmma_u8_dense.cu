#include "cuda/wgmma_launch.h"

namespace effinfer::cuda {

void launch_wgmma_u8_dense(const ops::PackedFormat& format, const ops::Operand& x,
                           const TileParams& tile, Queue& queue) {
  launch_wgmma_formats<ops::QuantBits::u8, ops::QuantBits::bf16, ops::QuantBits::f16>(format, x,
                                                                                      tile, queue);
}

void launch_wgmma(const ops::PackedFormat& format, const ops::Operand& x, const TileParams& tile,
                  Queue& queue) {
  switch (format.bits) {
    case ops::QuantBits::u4:
      return launch_wgmma_u4(format, x, tile, queue);
    case ops::QuantBits::u5:
    case ops::QuantBits::u6:
      return launch_wgmma_u5_u6(format, x, tile, queue);
    default:
      return launch_wgmma_u8_dense(format, x, tile, queue);
  }
}

}  // namespace effinfer::cuda
