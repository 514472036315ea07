#include "cuda/stream_launch.h"

namespace effinfer::cuda {
namespace {

template <int kTiles>
void launch_tiles(PairParams& params, Queue& queue) {
  using Kernel = StreamPair<kTiles>;
  StreamParams& stream = params.stream;
  stream.token_blocks = static_cast<int32_t>(blocks_for(stream.tokens, Kernel::kTokens));
  launch<Kernel>(params, int64_t{stream.parts[0].blocks} * stream.token_blocks, queue);
}

}  // namespace

void launch_pair(PairParams& params, Queue& queue) {
  if (params.stream.tokens <= kTileTokens) return launch_tiles<1>(params, queue);
  launch_tiles<4>(params, queue);
}

}  // namespace effinfer::cuda
