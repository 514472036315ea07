// The kernels of bodies/stream_block.h by the format of their weights. They take long to compile,
// so four files share them.
#pragma once

#include "cuda/bodies/stream_block.h"
#include "cuda/bodies/stream_formats.h"
#include "cuda/bodies/stream_pair.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {

// Launches the kernel of `format` with the fewest tiles that hold all tokens, or with 4 for each 32
// of them.
void launch_u4(const ops::PackedFormat& format, StreamParams& params, Queue& queue);
void launch_u5_u6(const ops::PackedFormat& format, StreamParams& params, Queue& queue);
void launch_u8_dense(const ops::PackedFormat& format, StreamParams& params, Queue& queue);

// Both weights of a GLU, of any two of the formats.
void launch_pair(PairParams& params, Queue& queue);

template <class Kernel>
void launch_stream(StreamParams& params, int64_t blocks, Queue& queue) {
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, Kernel::kTokens));
  launch<Kernel>(params, blocks * params.token_blocks, queue);
}

// Whether 128 registers, of 16 warps a multiprocessor, are enough for two tiles.
template <ops::PackedFormat kFormat>
constexpr bool pairs_tiles() {
  return kFormat.bits == ops::QuantBits::u4 && !kFormat.has_min && kFormat.sub_block == 32;
}

// A multiprocessor has 16 warps, in two blocks or in one, where their registers allow it, and else
// 8 of two rounds: with four tiles, and most formats with two.
template <ops::PackedFormat kFormat>
void launch_format(StreamParams& params, Queue& queue) {
  int64_t blocks = 0;
  for (const StreamPart& part : params.parts) blocks += part.blocks;
  if (params.tokens > 2 * kTileTokens) {
    launch_stream<StreamMatmul<kFormat, 4, 32, 1, 8, 2>>(params, blocks, queue);
  } else if (params.tokens > kTileTokens) {
    if constexpr (pairs_tiles<kFormat>()) {
      launch_stream<StreamMatmul<kFormat, 2, 20, 1, 16>>(params, blocks, queue);
    } else {
      launch_stream<StreamMatmul<kFormat, 2, 40, 1, 8, 2>>(params, blocks, queue);
    }
  } else if (params.slots == kMostSlots) {
    launch_stream<StreamMatmul<kFormat, 1, 20, 1, 16>>(params, blocks, queue);
  } else {
    launch_stream<StreamMatmul<kFormat, 1, 40, 2>>(params, blocks, queue);
  }
}

// Compiles the formats of `kBits`.
template <ops::QuantBits... kBits>
void launch_formats(const ops::PackedFormat& format, StreamParams& params, Queue& queue) {
  with_stream_format(format, [&]<ops::PackedFormat kFormat>() {
    if constexpr (((kFormat.bits == kBits) || ...)) launch_format<kFormat>(params, queue);
  });
}

}  // namespace effinfer::cuda
