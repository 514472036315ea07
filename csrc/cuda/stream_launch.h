// The kernels of bodies/stream_block.h by the format of their weights. They take long to compile,
// so four files share them.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/bodies/stream_block.h"
#include "cuda/bodies/stream_formats.h"
#include "cuda/bodies/stream_pair.h"
#include "cuda/entry.h"
#include "cuda/register.h"
#include "effinfer/error.h"

namespace effinfer::cuda {

// Launches the kernel of `format` with the fewest tiles that hold all tokens, or with 4 for each 32
// of them, or for as many as the GPU's shared memory allows. All have the same bits.
void launch_u4(const ops::PackedFormat& format, StreamParams& params, Queue& queue);
void launch_u5_u6(const ops::PackedFormat& format, StreamParams& params, Queue& queue);
void launch_u8_dense(const ops::PackedFormat& format, StreamParams& params, Queue& queue);

// Both weights of a GLU, of any two of the formats.
void launch_pair(PairParams& params, Queue& queue);

// The most places, of which one is multiplied, with which a block has at most `bytes` of shared
// memory; less than two are none.
template <class Kernel>
int places_within(int64_t bytes, int tokens) {
  int places = kMostPlaces;
  while (places >= 2 && Kernel::kThreads / kWarp * Kernel::warp_bytes(places, tokens) > bytes) {
    --places;
  }
  return places < 2 ? 0 : places;
}

// Launches it, or says that the GPU's blocks have too little shared memory for so many tokens.
template <class Kernel>
bool launch_stream(StreamParams& params, int tokens, int64_t blocks, Queue& queue) {
  const int64_t most = shared_bytes_of(queue);
  // The system takes 1 KB beside each block's.
  params.places = places_within<Kernel>((most + 1024) / Kernel::kMinBlocks - 1024, tokens);
  if (params.places == 0) params.places = places_within<Kernel>(most, tokens);
  if (params.places == 0) return false;
  params.block_tokens = tokens;
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, tokens));
  params.warp_bytes = Kernel::warp_bytes(params.places, tokens);
  launch<Kernel>(params, blocks * params.token_blocks, queue,
                 static_cast<size_t>(Kernel::kThreads / kWarp * params.warp_bytes));
  return true;
}

// A multiprocessor has 16 warps, in two blocks or in one, but with four tiles 8 of two rounds, as
// where so many warps have no room for their rings.
template <ops::PackedFormat kFormat>
void launch_format(StreamParams& params, Queue& queue) {
  int64_t blocks = 0;
  for (const StreamPart& part : params.parts) blocks += part.blocks;
  const int tokens = params.tokens;
  if (params.slots != kMostSlots) {
    if (launch_stream<StreamMatmul<kFormat, 1, 2, 8>>(params, tokens, blocks, queue)) return;
  } else if (tokens <= kTileTokens) {
    if (launch_stream<StreamMatmul<kFormat, 1, 1, 16>>(params, tokens, blocks, queue)) return;
  } else if (tokens <= 2 * kTileTokens) {
    if (launch_stream<StreamMatmul<kFormat, 2, 1, 16>>(params, tokens, blocks, queue)) return;
  }
  for (int most = 4 * kTileTokens; most >= kTileTokens; most /= 2) {
    using Kernel = StreamMatmul<kFormat, 4, 1, 8, 2>;
    if (launch_stream<Kernel>(params, std::min(tokens, most), blocks, queue)) return;
  }
  throw InternalError("[matmul] no ring fits into " + std::to_string(shared_bytes_of(queue)) +
                      " bytes of shared memory");
}

// Compiles the formats of `kBits`.
template <ops::QuantBits... kBits>
void launch_formats(const ops::PackedFormat& format, StreamParams& params, Queue& queue) {
  with_stream_format(format, [&]<ops::PackedFormat kFormat>() {
    if constexpr (((kFormat.bits == kBits) || ...)) launch_format<kFormat>(params, queue);
  });
}

}  // namespace effinfer::cuda
