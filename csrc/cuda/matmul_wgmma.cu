// Matmuls with weights that are rounded, on Hopper.
#include "cuda/wgmma_launch.h"

namespace effinfer::cuda {

void multiply_wgmma(const ops::MatmulProblem& problem, const MatmulParts& takes, Queue& queue) {
  const TileParams params = tile_params(problem, takes);
  const ops::PackedFormat format = tile_format(problem, takes);
  switch (format.bits) {
    case ops::QuantBits::u4:
      return launch_wgmma_u4(format, problem.x, params, queue);
    case ops::QuantBits::u5:
    case ops::QuantBits::u6:
      return launch_wgmma_u5_u6(format, problem.x, params, queue);
    default:
      return launch_wgmma_u8_dense(format, problem.x, params, queue);
  }
}

}  // namespace effinfer::cuda
