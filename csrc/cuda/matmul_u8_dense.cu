#include "cuda/stream_launch.h"

namespace effinfer::cuda {

void launch_u8_dense(const ops::PackedFormat& format, StreamParams& params, Queue& queue) {
  using enum ops::QuantBits;
  launch_formats<u8, bf16, f16>(format, params, queue);
}

}  // namespace effinfer::cuda
