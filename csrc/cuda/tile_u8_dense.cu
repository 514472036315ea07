#include "cuda/tile_launch.h"

namespace effinfer::cuda {

void launch_tiles_u8_dense(const ops::PackedFormat& format, const ops::Operand& x,
                           TileParams& params, TileShape shape, Queue& queue) {
  using enum ops::QuantBits;
  launch_tile_formats<u8, bf16, f16>(format, x, params, shape, queue);
}

}  // namespace effinfer::cuda
