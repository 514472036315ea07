#include "cuda/tile_launch.h"

namespace effinfer::cuda {

void launch_tiles_u4(const ops::PackedFormat& format, TileParams& params, Queue& queue) {
  launch_tile_formats<ops::QuantBits::u4>(format, params, queue);
}

}  // namespace effinfer::cuda
