#include "cuda/wgmma_launch.h"

namespace effinfer::cuda {

void launch_wgmma_u8_dense(const ops::PackedFormat& format, const ops::Operand& x,
                           const TileParams& tile, Queue& queue) {
  launch_wgmma_formats<ops::QuantBits::u8, ops::QuantBits::bf16, ops::QuantBits::f16>(format, x,
                                                                                      tile, queue);
}

}  // namespace effinfer::cuda
