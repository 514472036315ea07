#include "cuda/tile_launch.h"

namespace effinfer::cuda {

void launch_tiles_u5_u6(const ops::PackedFormat& format, TileParams& params, Queue& queue) {
  using enum ops::QuantBits;
  launch_tile_formats<u5, u6>(format, params, queue);
}

}  // namespace effinfer::cuda
