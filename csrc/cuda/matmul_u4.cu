#include "cuda/stream_launch.h"

namespace effinfer::cuda {

void launch_u4(const ops::PackedFormat& format, StreamParams& params, Queue& queue) {
  launch_formats<ops::QuantBits::u4>(format, params, queue);
}

}  // namespace effinfer::cuda
