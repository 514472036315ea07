#include "cuda/stream_launch.h"

namespace effinfer::cuda {

// Two formats in a GLU are rare: tokens of all numbers share a kernel.
void launch_pair(PairParams& params, Queue& queue) {
  using Kernel = StreamPair<2>;
  StreamParams& stream = params.stream;
  const int tokens = std::min(stream.tokens, Kernel::kTokens);
  const auto fits = [&](const FeedShape& shape) {
    stream.feed = shape;
    stream.warp_bytes = stream.token_bytes = 0;
    for (const ops::PackedFormat& format : params.formats) {
      const PieceLayout piece = piece_layout(format);
      stream.warp_bytes = std::max(stream.warp_bytes, stream_warp_bytes(piece, shape, tokens, 1));
      stream.token_bytes = std::max(stream.token_bytes, token_bytes(piece, shape, tokens));
    }
    return kStreamWarps * (stream.warp_bytes + stream.token_bytes) <= shared_bytes_of(queue);
  };
  for (int places = kMostPlaces; places >= 2 && !fits({places, 0}); --places) {
  }
  stream.block_tokens = tokens;
  stream.token_blocks = static_cast<int32_t>(blocks_for(stream.tokens, tokens));
  launch<Kernel>(params, int64_t{stream.parts[0].blocks} * stream.token_blocks, queue,
                 static_cast<size_t>(kStreamWarps * (stream.warp_bytes + stream.token_bytes)));
}

}  // namespace effinfer::cuda
