#include "cuda/tile_launch.h"

namespace effinfer::cuda {

void launch_tiles_u4(const ops::PackedFormat& format, const ops::Operand& x, TileParams& params,
                     TileShape shape, Queue& queue) {
  launch_tile_formats<ops::QuantBits::u4>(format, x, params, shape, queue);
}

}  // namespace effinfer::cuda
