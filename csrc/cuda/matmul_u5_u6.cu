#include "cuda/stream_launch.h"

namespace effinfer::cuda {

void launch_u5_u6(const ops::PackedFormat& format, StreamParams& params, Queue& queue) {
  launch_formats<ops::QuantBits::u5, ops::QuantBits::u6>(format, params, queue);
}

}  // namespace effinfer::cuda
