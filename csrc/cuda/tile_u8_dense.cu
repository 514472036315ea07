#include "cuda/tile_launch.h"

namespace effinfer::cuda {

void launch_tiles(const ops::PackedFormat& format, TileParams& params, Queue& queue) {
  switch (format.bits) {
    case ops::QuantBits::u4:
      return launch_tiles_u4(format, params, queue);
    case ops::QuantBits::u5:
    case ops::QuantBits::u6:
      return launch_tiles_u5_u6(format, params, queue);
    default:
      return launch_tiles_u8_dense(format, params, queue);
  }
}

void launch_tiles_u8_dense(const ops::PackedFormat& format, TileParams& params, Queue& queue) {
  using enum ops::QuantBits;
  launch_tile_formats<u8, bf16, f16>(format, params, queue);
}

}  // namespace effinfer::cuda
