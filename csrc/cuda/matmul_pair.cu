#include "cuda/stream_launch.h"

namespace effinfer::cuda {

// Two formats in a GLU are rare: tokens of all numbers share a kernel.
void launch_pair(PairParams& params, Queue& queue) {
  using Kernel = StreamPair<16>;
  StreamParams& stream = params.stream;
  const int tokens = std::min(stream.tokens, Kernel::kTokens);
  const bool in_boxes = has_bulk_copies(queue);
  const auto fits = [&](const FeedShape& shape) {
    stream.feed = shape;
    stream.warp_bytes = stream.token_bytes = 0;
    for (const ops::PackedFormat& format : params.formats) {
      const PieceLayout piece = piece_layout(format);
      stream.warp_bytes = std::max(stream.warp_bytes, stream_warp_bytes(piece, shape, tokens, 1));
      // A superblock in each place, of which dense ones take half.
      stream.token_bytes = std::max(stream.token_bytes,
                                    stream_token_bytes<4, Kernel::kTiles>(shape, tokens, in_boxes));
    }
    stream.tokens_at = static_cast<int32_t>(tokens_at(kStreamWarps, stream.warp_bytes));
    return stream.tokens_at + kStreamWarps * stream.token_bytes <= shared_bytes_of(queue);
  };
  const int most = in_boxes ? kBulkPlaces : kMostPlaces;
  for (int places = most; places >= 2 && !fits({places, 0}); --places) {
  }
  if (in_boxes) {
    stream.x_map = token_map(stream, piece_layout(params.formats[0]), Kernel::kTokens, queue);
    params.second_map = token_map(stream, piece_layout(params.formats[1]), Kernel::kTokens, queue);
  }
  stream.block_tokens = tokens;
  stream.token_blocks = static_cast<int32_t>(blocks_for(stream.tokens, tokens));
  launch<Kernel>(params, int64_t{stream.parts[0].blocks} * stream.token_blocks, queue,
                 static_cast<size_t>(stream.tokens_at + kStreamWarps * stream.token_bytes));
}

}  // namespace effinfer::cuda
