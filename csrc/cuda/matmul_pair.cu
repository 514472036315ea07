#include "cuda/stream_launch.h"

namespace effinfer::cuda {

// Two formats in a GLU are rare: tokens of all numbers share a kernel.
void launch_pair(PairParams& params, Queue& queue) {
  using Kernel = StreamPair<2>;
  StreamParams& stream = params.stream;
  stream.token_blocks = static_cast<int32_t>(blocks_for(stream.tokens, Kernel::kTokens));
  launch<Kernel>(params, int64_t{stream.parts[0].blocks} * stream.token_blocks, queue);
}

}  // namespace effinfer::cuda
