#include "cuda/tile_launch.h"

namespace effinfer::cuda {

void launch_tiles_u5_u6(const ops::PackedFormat& format, const ops::Operand& x, TileParams& params,
                        TileShape shape, Queue& queue) {
  using enum ops::QuantBits;
  launch_tile_formats<u5, u6>(format, x, params, shape, queue);
}

}  // namespace effinfer::cuda
