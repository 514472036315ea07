#include "cuda/stream_launch.h"

namespace effinfer::cuda {

// Two formats in a GLU are rare: tokens of all numbers share a kernel.
void launch_pair(PairParams& params, Queue& queue) {
  using Kernel = StreamPair<2>;
  StreamParams& stream = params.stream;
  const int tokens = std::min(stream.tokens, Kernel::kTokens);
  const auto bytes_of = [&](const ops::PackedFormat& format, int places) {
    const FeedLayout layout(piece_layout(format, Kernel::kTokens / kTileTokens), places, tokens);
    return stream_warp_bytes(layout, tokens, 1);
  };
  const auto warp_bytes = [&](int places) {
    return std::max(bytes_of(params.formats[0], places), bytes_of(params.formats[1], places));
  };
  stream.places = most_places(queue);
  while (stream.places > 2 && kStreamWarps * warp_bytes(stream.places) > shared_bytes_of(queue)) {
    --stream.places;
  }
  stream.block_tokens = tokens;
  stream.token_blocks = static_cast<int32_t>(blocks_for(stream.tokens, tokens));
  stream.warp_bytes = warp_bytes(stream.places);
  launch<Kernel>(params, int64_t{stream.parts[0].blocks} * stream.token_blocks, queue,
                 static_cast<size_t>(kStreamWarps * stream.warp_bytes));
}

}  // namespace effinfer::cuda
